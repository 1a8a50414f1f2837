"""How Triton's kernels follow one another: a kernel's programs may start while those of the one before still run.

Every kernel lets the next one start at once, and every program of it, on every path, waits for the one before to end
before it reads anything that a kernel wrote, and before it writes. Since each waits for the one before it, what is read
after the wait is the work of all earlier ones; and memory that was freed and given to a later kernel is written only
when all that read it are done. Only weights, which no kernel of a step writes, may be touched before the wait: they
are brought nearer while memory has little else to do. Where the device or Triton's interpreter cannot do this, kernels
follow one another as usual.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from triton import knobs

LINE = 128
"""Bytes that are brought nearer at once."""


def _overlaps() -> bool:
    if knobs.runtime.interpret or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


OVERLAPS = tl.constexpr(_overlaps())
OPTIONS: dict[str, bool] = {"launch_pdl": True} if OVERLAPS.value else {}
"""Of every launch."""


@triton.jit
def follow():
    """Lets the next kernel start, and waits for the one before."""
    let_next_start()
    wait()


@triton.jit
def let_next_start():
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait():
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def bring_nearer(at):
    """Has the lines where these pointers point put into the device's shared cache; nothing waits for them."""
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )
