"""Finds the library built from csrc/ at install, if there is one, and says why not otherwise.

A plain C interface behind ctypes: nothing of torch's ABI, so one build serves every torch.
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headlong.env import native_library, native_ops_wanted
from headlong.errors import ConfigError

log = logging.getLogger(__name__)
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "headlong_rms_norm": (_POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG, _INT),
    "headlong_silu_mul": (_POINTER, _POINTER, _LONG, _LONG, _INT),
    "headlong_matmul": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _INT),
    "headlong_lay_out": (_POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
    "headlong_embed": (_POINTER, _POINTER, _LONG, _POINTER),
    "headlong_best": (_POINTER, _LONG, _LONG, _POINTER, _INT),
    "headlong_delta_net": (_POINTER,) * 4,
    "headlong_attention": (_POINTER,) * 4,
    "headlong_run": (_POINTER, _LONG, _POINTER, _LONG, _POINTER),
}


@cache
def library() -> ctypes.CDLL | None:
    """The native kernels, or None; the reason is logged once."""
    if not native_ops_wanted():
        log.info("native CPU kernels: turned off by HEADLONG_NATIVE=0; the reference ops serve")
        return None
    chosen = native_library()
    built = [chosen] if chosen is not None else sorted(Path(__file__).parent.glob("_native*.so"))
    if not built:
        log.info("native CPU kernels: not built (no C compiler at install); the reference ops serve, slower")
        return None
    try:
        found = ctypes.CDLL(str(built[-1]))
    except OSError as error:
        raise ConfigError(f"native CPU kernels: {error}; HEADLONG_NATIVE=0 does without them") from None
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why native kernels cannot serve this dtype and device; None if they can."""
    if device.type != "cpu":
        return f"run on the CPU, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"take float32 and bfloat16, not {dtype}"
    return "are not built" if library() is None else None


def kernel(name: str) -> Callable[..., None]:
    """One of the library's functions; tensors go in as `address(tensor)`."""
    found = library()
    assert found is not None, "asked for before `refusal` was heard"
    return getattr(found, name)


def address(tensor: Tensor) -> int:
    """Of float32 in one piece, which is what kernels take where nothing else is said."""
    assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    return tensor.data_ptr()
