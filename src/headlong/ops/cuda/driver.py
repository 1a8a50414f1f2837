"""Launches machine code through CUDA's driver: kernels, what they are given, and the descriptions of tensors by which
Hopper's copy engine (TMA) finds its tiles."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_SHARED_MEMORY = 8
"""The driver's number for the most shared memory that a block may have."""
_SWIZZLE_128, _PROMOTE_256 = 3, 3
_TYPES = {torch.int16: 1, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType: whole numbers of 16 bits, and floats."""


class DriverError(RuntimeError):
    """A call of the driver failed; the message says which, and its status."""


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(str(error)) from error


def _call(name: str, *args: object) -> None:
    status = getattr(_driver(), name)(*args)
    if status:
        raise DriverError(f"{name} failed with status {status}")


class TensorMap(ctypes.Structure):
    """A CUtensorMap, which kernels take by value; its address is a multiple of 64."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)
    _align_ = 64


class Box(NamedTuple):
    """A tensor as the copy engine reads it, the innermost dimension first, and the tile that it brings at once. The
    innermost dimension of a tile is 128 bytes, which are swizzled."""

    sizes: Sequence[int]
    strides: Sequence[int]
    """The strides of all dimensions but the innermost, in elements."""
    tile: Sequence[int]

    def map(self, tensor: Tensor) -> TensorMap:
        """Describes a tensor; what lies beyond its sizes is brought as zeros."""
        rank, item = len(self.sizes), tensor.element_size()
        room = (ctypes.c_char * (ctypes.sizeof(TensorMap) + 64))()
        aligned = -(-ctypes.addressof(room) // 64) * 64
        _call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(aligned),
            _TYPES[tensor.dtype],
            rank,
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * rank)(*self.sizes),
            (ctypes.c_uint64 * max(rank - 1, 1))(*(stride * item for stride in self.strides)),
            (ctypes.c_uint32 * rank)(*self.tile),
            (ctypes.c_uint32 * rank)(*([1] * rank)),
            0,
            _SWIZZLE_128,
            _PROMOTE_256,
            0,
        )
        return TensorMap.from_buffer_copy((ctypes.c_char * ctypes.sizeof(TensorMap)).from_address(aligned))


class Kernel:
    """A kernel of a cubin, on the device that is current when it is made."""

    def __init__(self, code: bytes, name: str, *, threads: int, shared_memory: int) -> None:
        """`shared_memory`: what each block has of it, beside what the code declares itself."""
        self.threads, self.shared_memory = threads, shared_memory
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(self._module), code)
        _call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        _call("cuFuncSetAttribute", self._function, _MOST_SHARED_MEMORY, shared_memory)

    def __call__(self, blocks: int, args: Sequence[object]) -> None:
        """Launches it on torch's current stream. Arguments are ctypes' values, tensors, or None for no tensor."""
        values = [
            arg if isinstance(arg, ctypes._SimpleCData | ctypes.Structure) else _pointer(arg) for arg in args
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _call(
            "cuLaunchKernel", self._function, blocks, 1, 1, self.threads, 1, 1, self.shared_memory, stream,
            pointers, None,
        )  # fmt: skip


def _pointer(tensor: object) -> ctypes.c_void_p:
    assert tensor is None or isinstance(tensor, Tensor)
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
