"""What a step's native kernels share: which rows it feeds, where their pages are, and on how many threads."""

import ctypes

import torch
from torch import Tensor

from headlong.ops import native
from headlong.ops.rope.reference import Angles
from headlong.types import Rows


class _Step(ctypes.Structure):
    """Mirrors `Step` in csrc/cores.h."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "pages_width", "longest")),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


class NativeStep:
    """Made once for all layers; keeps what the structure points at."""

    def __init__(self, rows: Rows, pages_RP: Tensor | None = None) -> None:
        """`pages_RP` may be left out where nobody attends."""
        table, width = rows.table, 0
        longest = max(start + length for start, length in zip(rows.starts, rows.query_lens, strict=True))
        if pages_RP is not None:
            assert pages_RP.dtype == torch.long and pages_RP.is_contiguous()
            width = pages_RP.shape[1]
        self._kept = (table, pages_RP)
        self._step = _Step(
            table.data_ptr(),
            None if pages_RP is None else pages_RP.data_ptr(),
            len(rows.starts),
            width,
            longest,
            None,
            None,
            torch.get_num_threads(),
        )

    def address(self, angles: Angles | None = None) -> int:
        """Of the structure, with these rotations."""
        if angles is not None:
            self._step.cos, self._step.sin = native.address(angles.cos), native.address(angles.sin)
        return ctypes.addressof(self._step)
