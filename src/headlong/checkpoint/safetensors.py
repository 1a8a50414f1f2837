"""The safetensors container: a header of names, shapes and offsets, then bytes.

Headers are hostile input: whatever the file holds, `read_file` returns a table whose every entry lies
inside the file, or raises a `CheckpointError` that names the file, the tensor and the fault. Knows nothing
of shards, of folders or of what a tensor is for.
"""

import os
from io import FileIO
from pathlib import Path
from typing import Any

from headlong.checkpoint.strict_json import MAX_JSON_BYTES, parse_object
from headlong.checkpoint.tensor_info import TORCH_DTYPES, TensorInfo
from headlong.errors import CheckpointError
from headlong.small_files import open_regular

MAX_ELEMENTS = 2**48
MAX_RANK = 32
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"


def read_file(path: str | Path) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """The tensors of one safetensors file by name, and the file's own metadata. Every claim of the header is
    checked; no data is read."""
    path = Path(path)
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header_bytes(path, file, size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    entries = parse_object(header, f"{path}: header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: header: __metadata__ must be an object")
    data_start = _LENGTH_BYTES + len(header)
    infos = [_parse_entry(path, name, entry, data_start, size) for name, entry in entries.items()]
    _check_layout(path, infos, data_start, size)
    return {info.name: info for info in infos}, metadata


def _read_header_bytes(path: Path, file: FileIO, size: int) -> bytes:
    prefix = file.read(_LENGTH_BYTES)
    if len(prefix) < _LENGTH_BYTES:
        raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors file; fetch it again")
    if (prefix + file.read(len(_LFS_POINTER) - _LENGTH_BYTES)) == _LFS_POINTER:
        raise CheckpointError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
    length = int.from_bytes(prefix, "little")
    if length > MAX_JSON_BYTES or length > size - _LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: the header claims {length} bytes of a {size}-byte file; "
            "it is truncated or not safetensors at all"
        )
    file.seek(_LENGTH_BYTES)
    header = file.read(length)
    if len(header) != length:
        raise CheckpointError(f"{path}: the file shrank while its header was read")
    return header


def _parse_entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> TensorInfo:
    """One header entry, checked on its own; `_check_layout` checks it against its neighbours."""

    def fault(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r}: {what}")

    if not isinstance(entry, dict):
        raise fault(f"its entry must be an object, found {type(entry).__name__}")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise fault(f"unknown dtype {_short(dtype)}; known are {', '.join(TORCH_DTYPES)}")
    shape = entry.get("shape")
    # `type(d) is int` because a JSON `true` is an instance of int.
    if not isinstance(shape, list) or not all(type(d) is int and d >= 0 for d in shape):
        raise fault(f"shape must be a list of non-negative integers, found {_short(shape)}")
    numel = _count(shape)
    if numel is None:
        raise fault(f"shape {_short(shape)} is absurd: over {MAX_RANK} dimensions or 2**48 elements")
    offsets = entry.get("data_offsets")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(o) is int for o in offsets):
        raise fault(f"data_offsets must be two integers, found {_short(offsets)}")
    begin, end = offsets
    if begin < 0 or end < begin:
        raise fault(f"data_offsets {_short(offsets)} are negative or reversed")
    if data_start + end > size:
        raise fault(f"needs {_short(end)} data bytes but the file holds {size - data_start}; it is truncated")
    nbytes = numel * TORCH_DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise fault(f"{end - begin} bytes stored, but {dtype} {_short(shape)} takes {nbytes}")
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, nbytes)


def _count(shape: list[int]) -> int | None:
    """Number of elements, or None where the shape is absurd.

    Zeros count as ones against the limit: torch computes strides from the other dimensions of an empty
    tensor, and those must not overflow either.
    """
    if len(shape) > MAX_RANK:
        return None
    product = 1
    for d in shape:
        product *= max(d, 1)
        if product > MAX_ELEMENTS:
            return None
    return 0 if 0 in shape else product


def _check_layout(path: Path, infos: list[TensorInfo], data_start: int, size: int) -> None:
    """The tensors must tile the data exactly: bytes no tensor owns could smuggle anything."""
    at, previous = data_start, "the header"
    for info in sorted(infos, key=lambda i: (i.start, i.nbytes)):
        if info.start < at:
            raise CheckpointError(f"{path}: tensors {previous} and {info.name!r} overlap")
        if info.start > at:
            gap = info.start - at
            raise CheckpointError(f"{path}: {gap} unowned bytes between {previous} and tensor {info.name!r}")
        at, previous = info.start + info.nbytes, repr(info.name)
    if at != size:
        raise CheckpointError(f"{path}: {size - at} unowned bytes after {previous}, the last of the data")


def _short(value: Any) -> str:
    """`repr` cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
