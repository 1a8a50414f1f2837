"""Whole or not at all, and what is written against independent readers: safetensors and the gguf package."""

import json
import stat
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize, quantize
from safetensors import safe_open
from safetensors.torch import load_file

from headlong.checkpoint.gguf_writing import ALIGNMENT, WRITABLE, block_elements, write_gguf
from headlong.checkpoint.safetensors import read_file
from headlong.checkpoint.writing import (
    Entry,
    copied,
    replacing,
    replacing_folder,
    write_safetensors,
    write_sharded,
)
from headlong.errors import CheckpointError

Progress = list[tuple[str, int, int]]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def entry(name: str, tensor: torch.Tensor, dtype: str = "F32") -> Entry:
    return Entry(name, dtype, tuple(tensor.shape), lambda: tensor)


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    with replacing(out) as partial:
        partial.write_bytes(b"new")
        assert partial.parent == tmp_path and not out.exists() and partial.suffix == ".partial"
    assert out.read_bytes() == b"new" and left_behind(tmp_path) == ["out.bin"]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    out = tmp_path / "out.bin"
    out.write_bytes(b"old")
    with pytest.raises(error), replacing(out, force=True) as partial:
        partial.write_bytes(b"half")
        raise error
    assert out.read_bytes() == b"old" and left_behind(tmp_path) == ["out.bin"]


def test_existing_files_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    out.write_bytes(b"old")
    with pytest.raises(CheckpointError, match="exists already"), replacing(out):
        pytest.fail("nothing may be written")
    with replacing(out, force=True) as partial:
        partial.write_bytes(b"new")
    assert out.read_bytes() == b"new"
    with pytest.raises(CheckpointError, match="is a folder"), replacing(tmp_path, force=True):
        pytest.fail("nothing may be written")
    with pytest.raises(CheckpointError, match="cannot be written"), replacing(tmp_path / "no" / "out.bin"):
        pytest.fail("nothing may be written")


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"out\.bin: cannot be written \(No space left"),
        replacing(tmp_path / "out.bin"),
    ):
        raise OSError(28, "No space left on device")
    assert left_behind(tmp_path) == []


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with replacing_folder(out) as partial:
        (partial / "config.json").write_text("1")
        assert not out.exists()
    assert (out / "config.json").read_text() == "1" and left_behind(tmp_path) == ["model"]
    (tmp_path / "empty").mkdir()
    with replacing_folder(tmp_path / "empty") as partial:
        (partial / "config.json").write_text("2")
    assert (tmp_path / "empty" / "config.json").read_text() == "2"


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "config.json").write_text("old")
    (out / "old.safetensors").write_text("old")
    with pytest.raises(CheckpointError, match="not empty"), replacing_folder(out):
        pytest.fail("nothing may be written")
    with pytest.raises(KeyboardInterrupt), replacing_folder(out, force=True) as partial:
        (partial / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert left_behind(tmp_path) == ["model"] and left_behind(out) == ["config.json", "old.safetensors"]
    with replacing_folder(out, force=True) as partial:
        (partial / "config.json").write_text("new")
    assert left_behind(tmp_path) == ["model"] and left_behind(out) == ["config.json"]
    assert (out / "config.json").read_text() == "new"


def test_force_deletes_checkpoints_only(tmp_path: Path) -> None:
    """`-o ~ --force` must not cost anybody their home."""
    for name in ("notes", "home"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "letter.txt").write_text("dear")
    (tmp_path / "home" / "config.json").write_text("{}")
    (tmp_path / "home" / "photos").mkdir()
    for name in ("notes", "home"):
        with (
            pytest.raises(CheckpointError, match="not overwritten"),
            replacing_folder(tmp_path / name, force=True),
        ):
            pytest.fail("nothing may be written")
        assert (tmp_path / name / "letter.txt").read_text() == "dear"
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="no folder"), replacing_folder(tmp_path / "file", force=True):
        pytest.fail("nothing may be written")


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    weights = {
        "a": random(3, 5),
        "b": random(4).bfloat16(),
        "c": torch.tensor([[1, -2]], dtype=torch.int32),
        "d": random(2, 2).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(2.5),
    }
    dtypes = {"b": "BF16", "c": "I32", "d": "F8_E4M3"}
    entries = [entry(name, tensor, dtypes.get(name, "F32")) for name, tensor in weights.items()]
    calls: Progress = []
    write_safetensors(
        tmp_path / "x.safetensors", entries, {"format": "pt", "k": "v"}, lambda *call: calls.append(call)
    )
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "k": "v"}
    assert read_file(tmp_path / "x.safetensors")[0].keys() == weights.keys()
    total = sum(tensor.nbytes for tensor in weights.values())
    assert calls[-1] == ("write weights", total, total)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


def test_pieces_and_copies(tmp_path: Path) -> None:
    weight = random(64, 8)
    whole = Entry("w", "BF16", (64, 8), lambda: weight.split(10))
    write_safetensors(tmp_path / "one.safetensors", [whole])
    info = read_file(tmp_path / "one.safetensors")[0]["w"]
    write_safetensors(tmp_path / "two.safetensors", [Entry("v", "BF16", (64, 8), lambda: copied(info))])
    for file, name in (("one", "w"), ("two", "v")):
        assert torch.equal(load_file(tmp_path / f"{file}.safetensors")[name], weight.bfloat16())
    short = Entry("w", "F32", (64, 8), lambda: weight[:10])
    with pytest.raises(AssertionError, match="announced"):
        write_safetensors(tmp_path / "short.safetensors", [short])


def test_a_copy_of_a_file_that_shrank(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", [entry("w", random(64))])
    info = read_file(tmp_path / "one.safetensors")[0]["w"]
    (tmp_path / "one.safetensors").write_bytes(b"gone")
    with pytest.raises(CheckpointError, match="'w'"):
        list(copied(info))


def test_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    """Sixteen tensors of 4 MB, made when their turn comes."""
    alive = 0
    most = 0

    def make(seed: int) -> Iterator[bytes]:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        yield bytes([seed]) * 4_000_000
        alive -= 1

    entries = [Entry(f"t{i}", "U8", (4_000_000,), lambda i=i: make(i)) for i in range(16)]
    tracemalloc.start()
    write_safetensors(tmp_path / "big.safetensors", entries)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most == 1 and peak < 10_000_000
    assert (tmp_path / "big.safetensors").stat().st_size > 64_000_000


def test_shards(tmp_path: Path) -> None:
    weights = {f"w{i}": random(100, seed=i) for i in range(7)}
    entries = [entry(name, tensor) for name, tensor in weights.items()]
    calls: Progress = []
    write_sharded(tmp_path, entries, progress=lambda *call: calls.append(call), shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2800 and index["weight_map"].keys() == weights.keys()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert all(torch.equal(load_file(tmp_path / index["weight_map"][n])[n], w) for n, w in weights.items())
    assert calls[-1] == ("write weights", 2800, 2800)
    (tmp_path / "one").mkdir()
    write_sharded(tmp_path / "one", entries)
    assert left_behind(tmp_path / "one") == ["model.safetensors"]


METADATA = {
    "general.architecture": "qwen35",
    "general.name": "Müsli",
    "qwen35.block_count": 3,
    "qwen35.rope.freq_base": 1e6,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": ["a", "b\n", "ä"],
    "tokenizer.ggml.token_type": [1, 3, 1],
    "tokenizer.ggml.scores": [0.5, -1.0, 0.0],
    "qwen35.attention.recurrent_layers": [True, False, True],
    "tokenizer.ggml.merges": [],
}


def test_gguf_metadata_and_layout(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    weights = {"odd": random(3), "matrix": random(4, 32), "experts": random(2, 4, 32), "last": random(5)}
    calls: Progress = []
    entries = [entry(name, tensor) for name, tensor in weights.items()]
    write_gguf(path, METADATA, entries, lambda *call: calls.append(call))
    reader = GGUFReader(path)
    for key, value in METADATA.items():
        assert (key in reader.fields) == (value != [])
        if value != []:
            assert reader.fields[key].contents() == value
    kinds = {key: field.types for key, field in reader.fields.items()}
    assert kinds["qwen35.block_count"] == [GGUFValueType.UINT32]
    assert kinds["qwen35.rope.freq_base"] == [GGUFValueType.FLOAT32]
    assert kinds["tokenizer.ggml.add_bos_token"] == [GGUFValueType.BOOL]
    assert kinds["tokenizer.ggml.token_type"] == [GGUFValueType.ARRAY, GGUFValueType.INT32]
    assert kinds["tokenizer.ggml.scores"] == [GGUFValueType.ARRAY, GGUFValueType.FLOAT32]
    for tensor in reader.tensors:
        assert tensor.data_offset % ALIGNMENT == 0
        assert torch.equal(torch.from_numpy(np.array(tensor.data)), weights[tensor.name])
        assert tensor.shape.tolist() == list(reversed(weights[tensor.name].shape))
    total = sum(tensor.nbytes for tensor in weights.values())
    assert calls[-1] == ("write weights", total, total)


@pytest.mark.parametrize("dtype", WRITABLE)
def test_gguf_types(tmp_path: Path, dtype: str) -> None:
    """Packed piece by piece is packed at once."""
    weight = random(700, 4, 64, seed=3)
    kind = GGMLQuantizationType[dtype]
    entries = [
        Entry("w", dtype, (700, 4, 64), lambda: weight.split(90)),
        Entry("b", dtype, (700, 4, 64), lambda: [quantize(weight.numpy(), kind).tobytes()]),
    ]
    write_gguf(tmp_path / "x.gguf", METADATA, entries)
    for tensor in GGUFReader(tmp_path / "x.gguf").tensors:
        assert tensor.tensor_type is kind and tensor.shape.tolist() == [64, 4, 700]
        expected = dequantize(quantize(weight.numpy(), kind), kind)
        found = dequantize(np.array(tensor.data), kind)
        assert np.array_equal(found.reshape(expected.shape), expected)
    assert block_elements(dtype) == (32 if dtype.startswith("Q") else 1)


@pytest.mark.parametrize(
    ("dtype", "bad", "words"), [("F16", 1e5, "bf16"), ("Q8_0", float("nan"), "not finite")]
)
def test_gguf_values_that_do_not_fit(tmp_path: Path, dtype: str, bad: float, words: str) -> None:
    weight = random(2, 32)
    weight[1, 3] = bad
    with pytest.raises(CheckpointError, match=words) as caught:
        write_gguf(tmp_path / "x.gguf", METADATA, [entry("blk.0.w", weight, dtype)])
    assert "'blk.0.w'" in str(caught.value)
