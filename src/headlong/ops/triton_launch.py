"""Programmatic dependent launch (PDL): a kernel's programs may start while those of the kernel before it still run.

Every kernel calls `launch_dependents`, most of them at once, and every program of it, on every path, calls
`wait_for_previous_kernel` before it reads what other kernels of its pass wrote, and before it writes. Because each
kernel waits for the one before it, what is read after the wait is the work of all earlier ones; and memory that was
freed and given to a later kernel is written only when every kernel that reads it has ended. Where the device or
Triton's interpreter has no PDL, kernels follow one another as usual.

Before the wait, a program may read weights and whatever was there when its pass began: a pass begins with torch's
lookup of embeddings, which waits for all earlier kernels and lets nothing start before it has ended. And after a kernel
that waits first and launches its dependents only then, a program may read what the kernels before that one wrote: they
have ended.

A GEMM whose inputs were there before that, and which writes to memory that nothing uses, need not wait at all: it runs
beside the kernel before. One of its programs waits at its end, so that whoever waits for this kernel waits for both.

A GEMM's weights need not wait, only its inputs. Its software pipeline loads what later steps need, and what the first
steps need before the loop begins. The wait by `zero_after_previous_kernel` is on the inputs' path alone, so that the
first weights are on their way meanwhile.

This file knows nothing of what the kernels compute.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from triton import knobs


def _capability() -> tuple[int, int] | None:
    """The compute capability of the GPU, of which a process uses one; None where kernels run without a GPU."""
    if knobs.runtime.interpret or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


def _launch_options() -> dict[str, bool]:
    """Compiler options. A multiplication and an addition are fused into one instruction where they can be. That has
    been Triton's own choice and will not be from 3.10 on: a new Triton would change what kernels cost, and the last
    bits of what they compute."""
    if knobs.runtime.interpret:
        return {}
    return {"enable_fp_fusion": True, **({"launch_pdl": True} if HAS_PDL.value else {})}


CAPABILITY = _capability()
HAS_PDL = tl.constexpr(CAPABILITY is not None and CAPABILITY >= (9, 0))
HAS_WGMMA = CAPABILITY is None or CAPABILITY[0] == 9
"""Whether tiles of 64 rows and more are multiplied by instructions of four warps that leave registers for sums."""
CONVERTS_E4M3 = tl.constexpr(CAPABILITY is None or CAPABILITY >= (8, 9))
"""Whether the GPU has instructions for e4m3; without them, no kernel may be given numbers of that type."""
LAUNCH_OPTIONS = _launch_options()
"""Compiler options of every kernel launch."""


@triton.jit
def launch_dependents():
    """Lets the next kernel start (griddepcontrol.launch_dependents)."""
    if HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous_kernel():
    """Waits until the kernel before this one has ended and its writes can be seen (griddepcontrol.wait)."""
    if HAS_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def zero_after_previous_kernel(step):
    """Returns 0 as soon as the kernel before has ended. A load from an address that this 0 was added to happens after
    that, while a loop's other loads are not held up. It promises nothing about other loads: `wait_for_previous_kernel`
    still has to come."""
    if HAS_PDL:
        # Declared pure, so that a loop may run it ahead; that it takes the step keeps it in the loop.
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; and.b32 $0, $1, 0;", "=r,r", [step], dtype=tl.int32, is_pure=True, pack=1
        )
        return tl.multiple_of(zero, 64)
    else:
        return 0


@triton.jit
def launch_dependents_and_wait():
    """Begins a kernel that has nothing to do before the kernel before it has ended."""
    launch_dependents()
    wait_for_previous_kernel()
