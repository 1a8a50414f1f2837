"""What a step's native kernels share: which rows it feeds, where their pages are, and on how many threads."""

import ctypes
from functools import cached_property
from operator import add

import torch
from torch import Tensor

from headlong.ops import native
from headlong.ops.places import Places
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles
from headlong.types import Rows


class _Step(ctypes.Structure):
    """Mirrors `Step` in csrc/cores.h."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_rows", "stride_pages", "max_length")),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
    )


class NativeStep(PreparedStep):
    """The rows of one step, made once for all layers; it keeps alive what the C structure points at."""

    def __init__(self, rows: Rows, pages_RP: Tensor | None = None, page_size: int = 0) -> None:
        """`pages_RP` may be left out where nobody attends."""
        if pages_RP is not None:
            assert pages_RP.dtype == torch.long and pages_RP.is_contiguous()
        table_R5, longest = rows.table, max(map(add, rows.starts, rows.query_lens))
        self._kept = (table_R5, pages_RP)
        self._rows, self._page_size = rows, page_size
        self._step = _Step(
            table_R5.data_ptr(),
            None if pages_RP is None else pages_RP.data_ptr(),
            table_R5.shape[0],
            0 if pages_RP is None else pages_RP.shape[1],
            longest,
            None,
            None,
            native.num_threads(),
        )

    @classmethod
    def of(cls, rows: Rows, pages_RP: Tensor | None = None, page_size: int = 0) -> "NativeStep":
        return cls(rows, pages_RP, page_size)

    @cached_property
    def places(self) -> Places:
        pages_RP = self._kept[1]
        assert pages_RP is not None, "a step whose pages are known"
        return Places.of(self._rows, pages_RP, self._page_size)

    def address(self, angles: Angles | None = None) -> int:
        """Returns the address of the C structure that describes this step, with these rotations."""
        if angles is not None:
            self._step.cos, self._step.sin = native.address(angles.cos), native.address(angles.sin)
        return ctypes.addressof(self._step)
