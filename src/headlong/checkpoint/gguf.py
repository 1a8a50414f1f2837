"""The GGUF container, versions 2 and 3: metadata, then a table of tensors, then their bytes.

Headers are hostile input, as in `safetensors.py`: `read_gguf` returns metadata of plain Python values and a table
whose every entry lies inside the file, or raises a `CheckpointError` that names the file, the key or tensor, and the
fault. It reads the header and no data. Knows nothing of what keys and tensors mean, but for splitting over files.
"""

import os
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headlong.checkpoint.tensor_info import TORCH_DTYPES, TensorInfo
from headlong.errors import CheckpointError
from headlong.quant.gguf import BLOCK_SIZES
from headlong.small_files import open_regular

MAX_HEADER_BYTES = 2**27
"""Far above any real header (10 MB with 250,000 tokens), far below what would exhaust memory."""
MAX_ARRAY = 2**24
MAX_DEPTH = 4
MAX_ELEMENTS = 2**48
MAX_RANK = 4
MAX_NAME_BYTES = 65_535
MANY_STRINGS = 64
LOOK_BYTES = 64
"""How many bytes are looked at for each of many strings. Where strings are longer on average, they are read one by
one."""

_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs"
_FIRST_READ = 2**21
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_LEAST_BYTES = {_STRING: 8, _ARRAY: 12} | {kind: dtype.itemsize for kind, dtype in _SCALARS.items()}
"""The fewest bytes that one value of each type takes."""
_LEAST_KEY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_LENGTH = struct.Struct("<Q")


_PLAIN_TYPES = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
_BLOCK_TYPES = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
}
_BLOCK_TYPES |= {14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"}
_BLOCK_TYPES |= {19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}


@dataclass(frozen=True)
class _TensorType:
    """A tensor type of GGUF: `elements` of it take `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int


@cache
def _tensor_type(type_id: int) -> _TensorType | None:
    """The tensor type with this number; None if there is none. Types that cannot be unpacked are known by name and size
    as well, from the list of the `gguf` package."""
    if (name := _PLAIN_TYPES.get(type_id)) is not None:
        return _TensorType(name, 1, TORCH_DTYPES[name].itemsize)
    if (name := _BLOCK_TYPES.get(type_id)) is not None:
        return _TensorType(name, *BLOCK_SIZES[name])
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
        return _TensorType(kind.name, *GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        return None


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says of itself. For a split model, `path` is its first part and `tensors` are those of all."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _ReadMore(Exception):
    """Raised where the header goes on behind the bytes that were read."""


def read_gguf(path: str | Path) -> GgufFile:
    """Reads the header of one file and checks every claim of it."""
    path = Path(path)
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            amount = _FIRST_READ
            while True:
                file.seek(0)
                header = _Header(path, file.read(amount), size)
                try:
                    return header.parse()
                except _ReadMore:
                    if len(header.data) < amount:
                        raise CheckpointError(f"{path}: the file shrank while its header was read") from None
                    amount *= 8
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error


def open_gguf(path: str | Path) -> GgufFile:
    """The model that `path` is, or is a part of: a split model's parts are found beside it and read as one."""
    one = read_gguf(path)
    count = one.metadata.get("split.count", 1)
    if type(count) is not int or count < 0:
        raise CheckpointError(
            f"{one.path}: metadata key 'split.count': must be a whole number, found {count!r}"
        )
    if count <= 1:
        return one
    name = _SPLIT_NAME.fullmatch(one.path.name)
    if name is None or int(name["count"]) != count:
        raise CheckpointError(
            f"{one.path}: one of {count} parts, whose name must end in -00001-of-{count:05}.gguf and so on; "
            "give the parts their names back"
        )
    paths = [one.path.with_name(f"{name['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{one.path}: one of {count} parts, of which {', '.join(missing[:3])}{more} "
            f"{'are' if len(missing) > 1 else 'is'} missing; fetch all parts into one folder"
        )
    return _merge([one if part == one.path else read_gguf(part) for part in paths])


def _merge(parts: list[GgufFile]) -> GgufFile:
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        for key, expected in (("split.no", number), ("split.count", len(parts))):
            if part.metadata.get(key) != expected:
                found = _short(part.metadata.get(key))
                raise CheckpointError(f"{part.path}: {key} must be {expected} in this part, found {found}")
        for name, info in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.path}: tensor {name!r} is in {tensors[name].file.name} as well")
            tensors[name] = info
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{parts[0].path}: the parts should hold {_short(total)} tensors together, and hold {len(tensors)}; "
            "they are not of the same model"
        )
    return GgufFile(parts[0].path, parts[0].metadata, tensors)


class _Header:
    """A cursor over the first bytes of a file of `size` bytes."""

    def __init__(self, path: Path, data: bytes, size: int):
        self.path, self.data, self.size = path, data, size
        self.at = 0
        self.where = ""
        """The key or tensor being read, for messages."""

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.where}{what}")

    def parse(self) -> GgufFile:
        num_tensors, num_keys = self._preamble()
        metadata: dict[str, Any] = {}
        for i in range(num_keys):
            self.where = f"metadata key {i + 1} of {num_keys}: "
            key = self._name()
            self.where = f"metadata key {_short(key)}: "
            if key in metadata:
                raise self.fault("occurs twice")
            metadata[key] = self._value(self._number(4), depth=0)
        entries: dict[str, tuple[_TensorType, tuple[int, ...], int]] = {}
        for i in range(num_tensors):
            self.where = f"tensor {i + 1} of {num_tensors}: "
            name = self._name()
            self.where = f"tensor {_short(name)}: "
            if name in entries:
                raise self.fault("occurs twice")
            entries[name] = (*self._shape_and_type(), self._number(8))
        return GgufFile(self.path, metadata, self._table(entries, self._alignment(metadata)))

    def _preamble(self) -> tuple[int, int]:
        """Reads the numbers of tensors and of metadata keys."""
        if self.data.startswith(_LFS_POINTER):
            raise self.fault("a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
        if not self.data.startswith(_MAGIC):
            raise self.fault(f"not a GGUF file: it begins with {_short(self.data[:4])}, not {_MAGIC!r}")
        self.at = len(_MAGIC)
        version = self._number(4)
        if version and version & 0xFFFF == 0:
            raise self.fault("written for big-endian machines; only little-endian GGUF files can be read")
        if version not in (2, 3):
            raise self.fault(f"GGUF version {version} cannot be read, only 2 and 3; convert the model again")
        num_tensors, num_keys = self._number(8), self._number(8)
        for num, least, what in (
            (num_keys, _LEAST_KEY_BYTES, "metadata keys"),
            (num_tensors, _LEAST_TENSOR_BYTES, "tensors"),
        ):
            if num > (self.size - self.at) // least:
                raise self.fault(f"claims {num} {what}, more than its {self.size} bytes can describe")
        return num_tensors, num_keys

    def _take(self, count: int) -> int:
        """Moves over `count` bytes; returns where they begin."""
        at, self.at = self.at, self.at + count
        if self.at > len(self.data):
            self._beyond(self.at)
        return at

    def _beyond(self, end: int) -> None:
        if end > self.size:
            raise self.fault(
                f"the header goes on behind the end of the file ({self.size} bytes); it is truncated"
            )
        if end > MAX_HEADER_BYTES:
            raise self.fault(f"the header is over {MAX_HEADER_BYTES} bytes, which no real one is")
        raise _ReadMore

    def _number(self, width: int) -> int:
        at = self._take(width)
        return int.from_bytes(self.data[at : at + width], "little")

    def _name(self) -> str:
        name = self._strings(1)[0]
        length = len(name.encode())
        if not 0 < length <= MAX_NAME_BYTES:
            raise self.fault(f"a name of {length} bytes; between 1 and {MAX_NAME_BYTES} are allowed")
        return name

    def _strings(self, count: int) -> list[str]:
        """Reads `count` strings. A vocabulary and its merges are half a million strings, most of them short."""
        found = self._short_strings(count) if count >= MANY_STRINGS else None
        return self._decoded(self._pieces(count)) if found is None else found

    def _short_strings(self, count: int) -> list[str] | None:
        """Reads `count` strings without a loop in Python; None if one is empty, has 256 bytes or more, or is not UTF-8.

        The 8 bytes of each one's length are then a byte and seven zeros, and no others are zero. Where the zeros lie
        just where lengths say that the next ones are, this is what reading one by one would find.
        """
        line_B = np.frombuffer(
            self.data, np.uint8, min(len(self.data) - self.at, LOOK_BYTES * count), self.at
        )
        full_B = line_B != 0
        edges = np.flatnonzero(full_B[1:] != full_B[:-1])[: 2 * count] + 1
        if len(edges) < 2 * count:
            return None
        zeros_N, begin_N = edges[::2], edges[1::2]
        end_N = begin_N + line_B[zeros_N - 1]
        expected_N = np.concatenate(([1], end_N[:-1] + 1))
        if (zeros_N != expected_N).any() or (begin_N - zeros_N != 7).any() or end_N[-1] > len(line_B):
            return None
        if not (full_B[0] and full_B[begin_N[-1] : end_N[-1]].all()):
            return None
        text_B = line_B[: end_N[-1]].copy()
        text_B[zeros_N - 1] = 0
        try:
            strings = text_B[full_B[: end_N[-1]]][1:].tobytes().decode().split("\0")
        except UnicodeDecodeError:
            return None
        self.at += int(end_N[-1])
        return strings

    def _pieces(self, count: int) -> list[bytes]:
        data, at = self.data, self.at
        pieces: list[bytes] = []
        length_at, add = _LENGTH.unpack_from, pieces.append
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                add(data[start:at])  # less of it where the data ends before
        except (struct.error, OverflowError):
            self._beyond(at + 8)
        if at > len(data):
            self._beyond(at)
        self.at = at
        return pieces

    def _decoded(self, pieces: list[bytes]) -> list[str]:
        """The strings of these bytes. They are decoded all at once; one by one where a string contains the separator,
        or where the one that is not UTF-8 is to be named."""
        with suppress(UnicodeDecodeError):
            strings = b"\0".join(pieces).decode().split("\0")
            if len(strings) == len(pieces):
                return strings
        try:
            return [piece.decode() for piece in pieces]
        except UnicodeDecodeError as error:
            number = next(n for n, piece in enumerate(pieces) if piece == error.object)
            raise self.fault(f"string {number} is not UTF-8 ({error.reason})") from None

    def _value(self, value_type: int, depth: int) -> Any:
        if value_type == _ARRAY:
            if depth == MAX_DEPTH:
                raise self.fault(f"arrays are nested over {MAX_DEPTH} deep")
            return self._array(self._number(4), self._number(8), depth)
        return self._array(value_type, 1, depth)[0]

    def _array(self, value_type: int, count: int, depth: int) -> list[Any]:
        least = _LEAST_BYTES.get(value_type)
        if least is None:
            raise self.fault(f"unknown value type {value_type}")
        if count > (self.size - self.at) // least:
            raise self.fault(f"{count} values do not fit in the {self.size - self.at} bytes left of the file")
        if count > MAX_ARRAY:
            raise self.fault(f"an array of {count} values; over {MAX_ARRAY} is absurd")
        if value_type == _STRING:
            return self._strings(count)
        if value_type == _ARRAY:
            return [self._value(value_type, depth + 1) for _ in range(count)]
        at = self._take(count * least)
        values = np.frombuffer(self.data, _SCALARS[value_type], count, at)
        if value_type == _BOOL:
            if count and values.max() > 1:
                raise self.fault(f"a truth value must be 0 or 1, found {values.max()}")
            return values.astype(bool).tolist()
        return values.tolist()

    def _shape_and_type(self) -> tuple[_TensorType, tuple[int, ...]]:
        rank = self._number(4)
        if rank > MAX_RANK:
            raise self.fault(f"{rank} dimensions; at most {MAX_RANK} are allowed")
        shape = tuple(self._number(8) for _ in range(rank))[::-1]
        if 0 in shape or prod(shape) > MAX_ELEMENTS:
            raise self.fault(f"shape {list(shape)} is absurd: a dimension is 0, or over 2**48 elements")
        type_id = self._number(4)
        tensor_type = _tensor_type(type_id)
        if tensor_type is None:
            raise self.fault(f"unknown tensor type {type_id}; the file is damaged or of a newer kind")
        if tensor_type.elements > 1 and (not shape or shape[-1] % tensor_type.elements):
            raise self.fault(
                f"shape {list(shape)} cannot be {tensor_type.name}, whose rows are multiples of {tensor_type.elements}"
            )
        return tensor_type, shape

    def _alignment(self, metadata: dict[str, Any]) -> int:
        self.where = "metadata key 'general.alignment': "
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**30 or alignment & (alignment - 1):
            raise self.fault(f"must be a power of two, found {_short(alignment)}")
        return alignment

    def _table(
        self, entries: dict[str, tuple[_TensorType, tuple[int, ...], int]], alignment: int
    ) -> dict[str, TensorInfo]:
        data_start = -(-self.at // alignment) * alignment
        table: dict[str, TensorInfo] = {}
        for name, (tensor_type, shape, offset) in entries.items():
            self.where = f"tensor {_short(name)}: "
            if offset % alignment:
                raise self.fault(
                    f"its offset {offset} is not a multiple of the file's alignment, {alignment}"
                )
            nbytes = prod(shape) // tensor_type.elements * tensor_type.nbytes
            info = TensorInfo(name, tensor_type.name, shape, self.path, data_start + offset, nbytes)
            if info.start + info.nbytes > self.size:
                raise self.fault(
                    f"its {info.nbytes} bytes end at {info.start + info.nbytes}, but the file has {self.size}; "
                    "it is truncated"
                )
            table[name] = info
        self.where = ""
        for one, other in pairwise(sorted(table.values(), key=lambda info: info.start)):
            if one.start + one.nbytes > other.start:
                raise self.fault(f"tensors {_short(one.name)} and {_short(other.name)} overlap")
        return table


def _short(value: Any) -> str:
    """`repr` cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
