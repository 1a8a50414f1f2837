"""One tensor on disk: where its bytes lie and what they are. Knows no container; safetensors and GGUF both fill it."""

import math
import mmap
import sys
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from headlong.errors import CheckpointError
from headlong.quant.gguf import BLOCK_SIZES
from headlong.small_files import open_regular

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes whose values are the weights themselves; in any other the weights are packed."""
STAGING_BYTES = 16 * 2**20
OWN_PAGES = 2**16
"""A tensor of at least so many bytes gets pages of its own."""
PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
"""The flags for pages that no child process shares, which the system hands out faster."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies on disk. `dtype` is a safetensors name or a GGUF block type; `shape` is the logical shape,
    slowest dimension first; `start` counts bytes from the beginning of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOAT_DTYPES

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which the tensor's bytes are read: uint8 for packed blocks."""
        if self.dtype not in TORCH_DTYPES and self.dtype not in BLOCK_SIZES:
            raise CheckpointError(f"{self.file}: tensor {self.name!r}: type {self.dtype} is not supported")
        return TORCH_DTYPES.get(self.dtype, torch.uint8)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in which the tensor's bytes are read: a row of packed blocks is a row of bytes."""
        if self.dtype not in BLOCK_SIZES:
            return self.shape
        elements, nbytes = BLOCK_SIZES[self.dtype]
        return (*self.shape[:-1], self.shape[-1] // elements * nbytes)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor with undefined values. A large one on the CPU has pages of its own, which go back to the system when
    it is freed. Most weights are copied into another layout and freed; in the heap they would leave holes that add up
    to the size of the model."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < OWN_PAGES or torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, **PRIVATE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor of zeros. The pages of a large one on the CPU come zeroed from the system when they are first used,
    so what is never used takes neither time nor memory."""
    result = allocate(shape, dtype, device)
    own_pages = result.device.type == "cpu" and result.nbytes >= OWN_PAGES
    return result if own_pages else result.zero_()


def read_tensor(info: TensorInfo, device: torch.device | str = "cpu") -> torch.Tensor:
    """Reads exactly that tensor's bytes into a new tensor that owns its memory."""
    result = allocate(info.stored_shape, info.stored_dtype, device)
    read_into(info, result)
    return result


def map_tensor(info: TensorInfo) -> torch.Tensor:
    """The tensor mapped to its file: nothing is copied, and the mapping goes when the tensor is freed. It is meant for
    weights that are soon copied into another layout: whoever writes to the file meanwhile changes the tensor."""
    first = info.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    before = info.start - first
    try:
        with open_regular(info.file) as file:
            pages = mmap.mmap(file.fileno(), before + info.nbytes, access=mmap.ACCESS_COPY, offset=first)
    except ValueError:
        raise CheckpointError(f"{info.file}: tensor {info.name!r}: the file ends inside it") from None
    except OSError as error:
        raise _unreadable(info, error) from error
    stored = torch.frombuffer(pages, dtype=torch.uint8, count=info.nbytes, offset=before)
    return stored.view(info.stored_dtype).view(info.stored_shape)


def read_into(info: TensorInfo, out: torch.Tensor, staging: torch.Tensor | None = None) -> None:
    """Reads a tensor into `out`: contiguous, of its shape, of any dtype and on any device.

    Bytes that need no conversion go straight to their place, others piece by piece through `staging`, a CPU
    tensor of bytes that the caller may keep for the next read.
    """
    assert out.is_contiguous() and tuple(out.shape) == info.stored_shape
    if not info.nbytes:
        return
    flat, dtype = out.view(-1), info.stored_dtype
    try:
        with open_regular(info.file) as file:
            file.seek(info.start)
            # Not for torch.bool: a stray byte other than 0 and 1 in one is undefined behaviour.
            if flat.dtype is dtype and flat.device.type == "cpu" and dtype is not torch.bool:
                _fill(info, file, flat.view(torch.uint8))
                return
            if staging is None:
                staging = torch.empty(min(info.nbytes, STAGING_BYTES), dtype=torch.uint8)
            for target in flat.split(staging.numel() // dtype.itemsize):
                piece = staging[: target.numel() * dtype.itemsize]
                _fill(info, file, piece)
                target.copy_(piece.ne(0) if dtype is torch.bool else piece.view(dtype))
    except OSError as error:
        raise _unreadable(info, error) from error


def _unreadable(info: TensorInfo, error: OSError) -> CheckpointError:
    reason = error.strerror or error
    return CheckpointError(f"{info.file}: tensor {info.name!r}: cannot be read ({reason})")


def _fill(info: TensorInfo, file: FileIO, piece: torch.Tensor) -> None:
    """Fills the bytes of `piece`; one read of the system may return less than was asked for."""
    buffer = piece.numpy().data
    done = 0
    while done < len(buffer):
        got = file.readinto(buffer[done:])
        if not got:
            raise CheckpointError(f"{info.file}: tensor {info.name!r}: the file ends inside it")
        done += got
