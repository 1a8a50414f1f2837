"""Finds the library built from csrc/ at install, if there is one, and says why not otherwise.

A plain C interface behind ctypes: nothing of torch's ABI, so one build serves every torch.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headlong.env import native_library, native_ops_wanted
from headlong.errors import ConfigError
from headlong.ops.native_sources import digest_of

log = logging.getLogger(__name__)
NOT_BUILT = "are not built"
STALE = (
    "native CPU kernels: {} was built from other sources than this version's, so the reference ops serve, with the "
    "same tokens, about fifty times slower; build it anew with `pip install -e .` in a checkout, or else with "
    "`pip install --force-reinstall --no-deps --no-binary headlong headlong`"
)
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "headlong_rms_norm": (_POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG, _INT),
    "headlong_silu_mul": (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT),
    "headlong_matmul": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _INT),
    "headlong_lay_out": (_POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
    "headlong_lay_out_blocks": (_POINTER, _POINTER, _LONG, _POINTER, _INT),
    "headlong_embed": (_POINTER, _POINTER, _LONG, _POINTER, _INT),
    "headlong_argmax": (_POINTER, _LONG, _LONG, _POINTER, _INT),
    "headlong_draw": (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT),
    "headlong_sample": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT),
    "headlong_delta_net": (_POINTER,) * 4,
    "headlong_attention": (_POINTER,) * 4,
    "headlong_latent_attention": (_POINTER,) * 5,
    "headlong_experts": (_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _INT),
    "headlong_stream_mixes": (_POINTER,) * 6 + (_LONG,) * 3 + (_FLOAT, _INT),
    "headlong_run": (_POINTER, _LONG, _POINTER, _LONG, _POINTER),
}


class _Threads:
    """Divides CPU threads between torch and the native kernels. Each has threads of its own, and idle ones of one spin
    while the other's compute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._outside = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                # A thread that met torch first while another one was inside has been given one, and keeps it.
                self._outside = max(self._outside, torch.get_num_threads())
            self._users += 1
        torch.set_num_threads(1)  # of this Python thread; each has a number of its own

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._outside)
        with self._lock:
            self._users -= 1

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """A context in which torch has its threads back: what is measured of it has to hold outside native calls."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @property
    def count(self) -> int:
        return self._outside if self._users else torch.get_num_threads()


threads_for_native = _Threads()
"""A context (`with threads_for_native:`) in which torch keeps to one thread, and native kernels have all that it
had."""


def num_threads() -> int:
    """Returns how many threads native kernels use."""
    return threads_for_native.count


@cache
def library() -> ctypes.CDLL | None:
    """Returns the native kernels, or None; the reason is logged once."""
    if not native_ops_wanted():
        log.info("native CPU kernels: turned off by HEADLONG_NATIVE=0; the reference ops serve")
        return None
    if (reason := staleness()) is not None:
        log.info(reason)
        return None
    if (found := _opened()) is None:
        log.info("native CPU kernels: not built (no C compiler at install); the reference ops serve, slower")
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def _opened() -> ctypes.CDLL | None:
    chosen = native_library()
    built = [chosen] if chosen is not None else sorted(Path(__file__).parent.glob("_native*.so"))
    try:
        return ctypes.CDLL(str(built[-1])) if built else None
    except OSError as error:
        raise ConfigError(f"native CPU kernels: {error}; HEADLONG_NATIVE=0 does without them") from None


@cache
def staleness() -> str | None:
    """Why a library that there is cannot be taken, and what to do; None where there is none or it is of this version.
    It has to have every function that is called and to be built from the sources here, as far as it tells: what
    functions take may have changed where names have not."""
    if (found := _opened()) is None:
        return None
    if all(hasattr(found, name) for name in (*_SIGNATURES, "headlong_sources")):
        found.headlong_sources.restype = ctypes.c_char_p
        if found.headlong_sources().decode() in ("", digest_of(Path(__file__).parent / "csrc")):
            return None
    return STALE.format(found._name)


def refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why native kernels cannot serve this dtype and device; None if they can."""
    if device.type != "cpu":
        return f"run on the CPU, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"take float32 and bfloat16, not {dtype}"
    return NOT_BUILT if library() is None else None


def kernel(name: str) -> Callable[..., None]:
    """Returns one of the library's functions; tensors are passed as `address(tensor)`."""
    found = library()
    assert found is not None, "asked for before `refusal` was heard"
    return getattr(found, name)


def address(tensor: Tensor) -> int:
    """The address of a contiguous float32 tensor, which is what kernels take unless they say otherwise."""
    assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    return tensor.data_ptr()
