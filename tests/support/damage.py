"""Good tiny checkpoints, ways to break one thing in them, and what must come of it.

A `Damage` takes a folder and breaks it; a `Case` is the good folder to begin with, a damage and what the message must
say. Knows containers and file names, no formats.
"""

import json
import re
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.gguf import read_gguf
from headlong.checkpoint.gguf_writing import write_gguf
from headlong.checkpoint.writing import Entry, copied
from headlong.convert.to_gguf import to_gguf
from headlong.errors import CheckpointError, ConfigError, HeadError
from support import artifacts, tiny
from support.artifacts import time_limit

SECONDS = 60.0
MEGABYTES = 300
ONE, GGUF, SIDECAR, GGUF_SIDECAR = "model.safetensors", "model.gguf", "mtp.safetensors", "mtp-model.gguf"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
NAN, INF = float("nan"), float("inf")
Weights = dict[str, Tensor]
Damage = Callable[[Path], object]
RELEASES = {
    "plain": "Qwen--Qwen3.5-27B",
    "moe": "Qwen--Qwen3.5-35B-A3B",
    "fp8": "Qwen--Qwen3.6-27B-FP8",
    "nvfp4": "nvidia--Qwen3.6-27B-NVFP4",
    "gptq": "AutoRound--Qwen3.6-27B-W4A16-GPTQ",
    "awq": "AutoAWQ--Qwen3.5-27B-AWQ",
    "int4": "llm-compressor--Qwen3.5-27B-W4A16",
    "mlx": "mlx-community--Qwen3.5-35B-A3B-4bit",
}


Case = tuple[str, Damage, str]
"""The good folder, what is done to it, and the pattern of the message."""


def make_shards(folder: Path) -> None:
    made = tiny.make(folder / "floats", vocab_size=64)
    tiny.write_sharded(folder, tiny.read_config(made.folder), tiny.tensors(made))


def make_sidecar(folder: Path) -> None:
    """A head in a file that no index names."""
    made = artifacts.make(folder, RELEASES["plain"])
    weights = load_file(made.folder / ONE)
    head = {name: weights.pop(name) for name in list(weights) if name.startswith("mtp.")}
    save_file(weights, folder / ONE)
    save_file(head, folder / SIDECAR)


TOKENS = ["a", "b", "ab", *(chr(code) for code in range(ord("c"), ord("z"))), "<|end|>"]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [*TOKENS, *(f"[PAD{id}]" for id in range(len(TOKENS), 128))],
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 1) + [3] + [5] * (128 - len(TOKENS)),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
}


def make_gguf(folder: Path) -> None:
    made = artifacts.make(folder / "safetensors", RELEASES["plain"])
    to_gguf(Checkpoint.open(made.folder), folder / GGUF, type="q8_0")
    rewrite(folder / GGUF, lambda metadata, _: metadata.update(TOKENIZER))


def make_gguf_sidecar(folder: Path) -> None:
    make_gguf(folder)
    shutil.copy(folder / GGUF, folder / GGUF_SIDECAR)

    def behead(metadata: dict[str, Any], infos: dict[str, Any]) -> None:
        metadata["qwen35.block_count"] = metadata.pop("qwen35.block_count") - 1
        del metadata["qwen35.nextn_predict_layers"]
        for name in [name for name in infos if name.startswith("blk.4.")]:
            del infos[name]

    rewrite(folder / GGUF, behead)


BASES: dict[str, Callable[[Path], object]] = {
    **{base: lambda folder, name=name: artifacts.make(folder, name) for base, name in RELEASES.items()},
    "shards": make_shards,
    "sidecar": make_sidecar,
    "gguf": make_gguf,
    "gguf sidecar": make_gguf_sidecar,
}


def cut(file: str, keep: float) -> Damage:
    """Keeps so many bytes, or, below 1, such a part; negative: all but so many."""

    def damage(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])

    return damage


def put(file: str, data: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(data)


def instead(file: str, make: Callable[[Path], object]) -> Damage:
    """Something else under the file's name."""

    def damage(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return damage


def header(change: Callable[[dict[str, Any]], object], file: str = ONE) -> Damage:
    """Another header in front of the same data."""

    def damage(folder: Path) -> None:
        data = (folder / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return damage


def raw_header(text: bytes, file: str = ONE) -> Damage:
    return put(file, len(text).to_bytes(8, "little") + text)


def weights(change: Callable[[Weights], object], file: str = ONE) -> Damage:
    def damage(folder: Path) -> None:
        found = load_file(folder / file)
        change(found)
        metadata = {"format": "mlx" if any(name.endswith(".biases") for name in found) else "pt"}
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / file, metadata)
        index = folder / artifacts.INDEX
        if index.exists():  # so that the tensors are at fault and not their list
            listed = json.loads(index.read_text())["weight_map"]
            kept = {name: other for name, other in listed.items() if other != file or name in found}
            index.write_text(json.dumps({"weight_map": kept | dict.fromkeys(found, file)}))

    return damage


def tensor(name: str, change: Callable[[Tensor], Tensor | None], file: str = ONE) -> Damage:
    """One tensor replaced, or, by None, taken away."""

    def damage(found: Weights) -> None:
        changed = change(found.pop(name))
        if changed is not None:
            found[name] = changed

    return weights(damage, file)


def extra(name: str, value: Tensor, file: str = ONE) -> Damage:
    return weights(lambda found: found.update({name: value}), file)


def config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        whole = json.loads((folder / "config.json").read_text())
        whole.get("text_config", whole).update(changes)
        (folder / "config.json").write_text(json.dumps(whole))

    return damage


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """A GGUF file with other metadata or fewer tensors."""
    file = read_gguf(path)
    metadata, infos = dict(file.metadata), dict(file.tensors)
    change(metadata, infos)
    entries = [
        Entry(name, info.dtype, info.shape, lambda info=info: copied(info)) for name, info in infos.items()
    ]
    new = path.with_name("new")
    write_gguf(new, metadata, entries)
    new.replace(path)


def keys(changes: dict[str, Any], file: str = GGUF) -> Damage:
    """Other metadata; None takes a key away."""

    def damage(metadata: dict[str, Any], _: dict[str, Any]) -> None:
        metadata.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del metadata[key]

    return lambda folder: rewrite(folder / file, damage)


def patch(after: str, skip: int, value: bytes, file: str = GGUF) -> Damage:
    """Bytes put `skip` after a GGUF string."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        needle = struct.pack("<Q", len(after)) + after.encode()
        at = data.index(needle) + len(needle) + skip
        data[at : at + len(value)] = value
        (folder / file).write_bytes(data)

    return damage


def start(at: int, value: bytes) -> Damage:
    def damage(folder: Path) -> None:
        data = bytearray((folder / GGUF).read_bytes())
        data[at : at + len(value)] = value
        (folder / GGUF).write_bytes(data)

    return damage


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def filled(value: float, at: int = 0) -> Callable[[Tensor], Tensor]:
    def change(old: Tensor) -> Tensor:
        flat = old.float().reshape(-1)
        flat[at] = value
        return flat.view(old.shape).to(old.dtype)

    return change


def fewer(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda old: old.narrow(dim, 0, old.shape[dim] - 1)


def gone(_: Tensor) -> None:
    return None


def spoil(path: Path, name: str, value: float = NAN) -> None:
    info = read_gguf(path).tensors[name]
    data = bytearray(path.read_bytes())
    data[info.start : info.start + 2] = struct.pack("<e", value)
    path.write_bytes(data)


def path_in(folder: Path) -> Path:
    """What to open."""
    return folder / GGUF if (folder / GGUF).exists() else folder


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Good:
    """The folders to begin with, each made when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._folders: dict[str, Path] = {}

    def __call__(self, base: str) -> Path:
        if base not in self._folders:
            self._folders[base] = self._factory.mktemp("good")
            BASES[base](self._folders[base])
        return self._folders[base]

    def damaged(self, case: Case, folder: Path) -> Path:
        """A copy after the damage."""
        base, damage, _ = case
        shutil.copytree(self(base), folder, dirs_exist_ok=True)
        damage(folder)
        return path_in(folder)


def assert_drafts(path: Path) -> None:
    llm = LLM(path, mtp="on", device="cpu")
    assert llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)).stats.mtp


def assert_one_clear_error(path: Path, message: str) -> None:
    before = memory()
    with time_limit(SECONDS), pytest.raises((CheckpointError, ConfigError)) as caught:
        LLM(path, device="cpu")
    found = str(caught.value)
    assert re.search(message, found), found
    where = path.parent if path.suffix == ".gguf" else path
    assert str(where) in found or found.startswith("config.json: "), found
    assert len(found.splitlines()[0]) < 600 and "Traceback" not in found
    assert memory() - before < MEGABYTES


def assert_served_plainly(path: Path, message: str) -> None:
    """Without drafts, saying why; an error only where MTP was insisted on."""
    with time_limit(SECONDS):
        llm = LLM(path, device="cpu")
        assert llm.mtp_refusal is not None and "\n" not in llm.mtp_refusal
        assert re.search(message, llm.mtp_refusal), llm.mtp_refusal
        done = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(done.token_ids) == 4 and not done.stats.mtp
    with time_limit(SECONDS), pytest.raises(HeadError, match=r"mtp='on', but (?s:.*)use mtp='auto'"):
        LLM(path, mtp="on", device="cpu")
    assert LLM(path, mtp="off", device="cpu").mtp_refusal == "MTP was turned off (mtp='off')"
