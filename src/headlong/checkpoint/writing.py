"""Files that appear whole or not at all, and safetensors written one tensor at a time.

What is being written has a hidden temporary name in the same folder and is renamed when it is complete and on disk;
on any failure, an interrupt included, it is deleted. Knows nothing of what the tensors mean.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from headlong.checkpoint.leftovers import OLD, PARTIAL, writing
from headlong.checkpoint.shards import INDEX, SINGLE
from headlong.checkpoint.tensor_info import TORCH_DTYPES, TensorInfo
from headlong.errors import CheckpointError
from headlong.progress import ProgressFn, silent

SHARD_BYTES = 5_000_000_000
CHUNK_BYTES = 16 * 2**20

Chunk = Tensor | bytes | memoryview


@dataclass(frozen=True)
class Entry:
    """A tensor to be written. `data` is called once, when its turn comes, and returns the tensor, or pieces of it one
    after the other: in the stored dtype, in any float dtype, which is then converted, or as the bytes to be stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Tensor | Iterable[Chunk]]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def chunks(self) -> Iterator[Chunk]:
        found = self.data()
        yield from (found,) if isinstance(found, Tensor) else found


def copied(info: TensorInfo) -> Iterator[bytes]:
    """The bytes of a tensor on disk, piece by piece."""
    try:
        with info.file.open("rb") as file:
            file.seek(info.start)
            left = info.nbytes
            while left:
                piece = file.read(min(left, CHUNK_BYTES))
                if not piece:
                    raise CheckpointError(f"{info.file}: tensor {info.name!r}: the file ends inside it")
                left -= len(piece)
                yield piece
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{info.file}: tensor {info.name!r}: cannot be read ({reason})") from error


@contextmanager
def replacing(path: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yields the temporary path of a file that becomes `path` if the block succeeds. Refuses to overwrite unless
    `force`d."""
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder; name the file to write")
    if path.exists() and not force:
        raise CheckpointError(f"{path}: exists already; use --force to overwrite it")
    with _errors_of(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent)
        os.close(handle)
        partial = Path(name)
        try:
            with writing(partial):
                partial.chmod(0o666 & ~_umask())
                yield partial
                _sync(partial)
                os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync(path.parent)


@contextmanager
def replacing_folder(path: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yields an empty temporary folder that becomes `path` if the block succeeds.

    A folder that holds something is replaced only where `force`d, and only if it is a checkpoint: files, one of them
    config.json, and no folders.
    """
    path = Path(path)
    _check_replaceable(path, force)
    with _errors_of(path):
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.absolute().parent))
        try:
            with writing(partial):
                partial.chmod(0o777 & ~_umask())
                yield partial
                for file in (*partial.iterdir(), partial):
                    _sync(file)
                _swap(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(path.absolute().parent)


def _check_replaceable(path: Path, force: bool) -> None:
    if path.is_file() or path.is_symlink():
        raise CheckpointError(f"{path}: is no folder; name the folder to write")
    if not path.is_dir():
        return
    try:
        inside = list(path.iterdir())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    if inside and not force:
        raise CheckpointError(f"{path}: exists already and is not empty; use --force to overwrite it")
    is_model = any(file.name == "config.json" or file.suffix == ".gguf" for file in inside)
    is_checkpoint = is_model and not any(file.is_dir() for file in inside)
    if inside and not is_checkpoint:
        raise CheckpointError(
            f"{path}: holds more than a checkpoint and is not overwritten; name another folder"
        )


def _swap(partial: Path, path: Path) -> None:
    """Puts `partial` in the place of `path`; what was there goes away last."""
    if not path.exists() or not any(path.iterdir()):
        os.replace(partial, path)
        return
    old = partial.with_name(partial.name + OLD)
    os.replace(path, old)
    try:
        os.replace(partial, path)
    except BaseException:
        os.replace(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror or error})") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_safetensors(
    path: Path,
    entries: Sequence[Entry],
    metadata: dict[str, str] | None = None,
    progress: ProgressFn = silent,
    label: str = "write weights",
) -> None:
    """Writes one file, holding no more than one piece of one tensor."""
    total = sum(_nbytes(entry) for entry in entries)
    with path.open("wb") as file:
        _write_file(file, entries, metadata, lambda done: progress(label, done, total))


def write_sharded(
    folder: Path,
    entries: Sequence[Entry],
    metadata: dict[str, str] | None = None,
    progress: ProgressFn = silent,
    label: str = "write weights",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes model.safetensors, or above `shard_bytes` several files and their index."""
    shards = _deal(entries, shard_bytes)
    total = sum(_nbytes(entry) for entry in entries)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    before = 0
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            _write_file(
                file, shard, metadata, lambda done, before=before: progress(label, before + done, total)
            )
        before += sum(_nbytes(entry) for entry in shard)
    if len(shards) > 1:
        weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _deal(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        if shards[-1] and used + _nbytes(entry) > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += _nbytes(entry)
    return shards


def _write_file(
    file: BinaryIO,
    entries: Sequence[Entry],
    metadata: dict[str, str] | None,
    report: Callable[[int], None],
) -> None:
    header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    at = 0
    for entry in entries:
        assert entry.name not in header, f"{entry.name} twice"
        end = at + _nbytes(entry)
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begin aligned
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    done = 0
    for entry in entries:
        written = 0
        for chunk in entry.chunks():
            written += file.write(_encode(chunk, TORCH_DTYPES[entry.dtype]))
            report(done + written)
        assert written == _nbytes(entry), f"{entry.name}: {written} bytes given, {_nbytes(entry)} announced"
        done += written


def _nbytes(entry: Entry) -> int:
    return entry.numel * TORCH_DTYPES[entry.dtype].itemsize


def _encode(chunk: Chunk, dtype: torch.dtype) -> bytes | memoryview:
    if not isinstance(chunk, Tensor):
        return chunk
    assert chunk.dtype == dtype or (chunk.is_floating_point() and dtype.is_floating_point), (
        chunk.dtype,
        dtype,
    )
    return raw_bytes(chunk.to(dtype))


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's memory, little-endian, as a file stores it."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
