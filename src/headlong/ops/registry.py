"""Chooses, once at load, whose ops serve a dtype on a device, and logs why nobody faster does."""

import logging
from importlib import import_module

import torch

from headlong.env import native_ops_wanted
from headlong.ops import native
from headlong.ops.backend import NEAR_TIES, Backend
from headlong.ops.linear.onednn import cpu_multiplies_bfloat16
from headlong.ops.native_backend import NativeBackend
from headlong.ops.reference_backend import ReferenceBackend
from headlong.ops.triton_step import refusal as triton_refusal

log = logging.getLogger(__name__)
NO_LIBRARY = (
    "no native CPU kernels here (no C compiler at install): the reference ops serve, with the same tokens, about fifty "
    "times slower; install gcc and run `pip install --force-reinstall --no-deps --no-binary headlong headlong`, or "
    "`pip install -e .` in a checkout"
)


def choose_backend(dtype: torch.dtype, device: torch.device) -> Backend:
    """Chooses Triton's kernels where they can serve, else the native ones, else the reference."""
    reason = triton_refusal(dtype, device)
    if reason is None:
        return import_module("headlong.ops.triton_backend").TritonBackend(dtype, device)
    if device.type == "cuda" and dtype != torch.float64:
        log.warning("Triton kernels %s: the reference ops serve, and %s", reason, NEAR_TIES)
    reason = native.refusal(dtype, device)
    if reason is None:
        return NativeBackend(dtype, device)
    if device.type == "cpu":
        log.info("native kernels %s: the reference ops serve", reason)
    return ReferenceBackend(dtype, device)


def shortfall(ops: Backend) -> str | None:
    """What it costs that the reference serves for want of a native library, and how to get one, in a line; None where
    something faster serves, or where somebody chose the reference."""
    if type(ops) is not ReferenceBackend or ops.device.type != "cpu" or not native_ops_wanted():
        return None
    if native.refusal(ops.dtype, ops.device) != native.NOT_BUILT:
        return None
    return native.staleness() or NO_LIBRARY


def default_dtype(device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """Returns the checkpoint's own dtype where the device multiplies it well, else float32; `stored` is None where all
    of it is packed."""
    if device.type == "cpu":
        multiplied = native.refusal(torch.bfloat16, device) is None or cpu_multiplies_bfloat16()
        return torch.bfloat16 if stored == torch.bfloat16 and multiplied else torch.float32
    return stored if stored in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16
