"""How Triton's kernels follow one another: a kernel's programs may start while those of the one before still run.

Every kernel lets the next one start, most of them at once, and every program of it, on every path, waits for the one
before to end before it reads what kernels of its pass wrote, and before it writes. Since each waits for the one before
it, what is read after the wait is the work of all earlier ones; and memory that was freed and given to a later kernel
is written only when all that read it are done. Where the device or Triton's interpreter cannot do this, kernels follow
one another as usual.

Before it waits, a program may read weights and what was there when its pass began: a pass begins with torch's look-up
of embeddings, which waits for all before it and lets nothing start before it has ended. And after a kernel that waits
first and lets the next one start then, it may read what those before that kernel wrote: they have ended.

A product whose inputs were there before that, and which writes where nothing is in use, need not wait at all: it runs
beside the kernel before. One program of it waits in the end, so that whoever waits for it waits for both.

A product's weights need not wait, only its inputs. Its loop asks for what later steps need, and for the first ones'
before it begins: waiting there by `waited`, on the inputs' way alone, the first weights are on theirs meanwhile.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from triton import knobs


def _overlaps() -> bool:
    if knobs.runtime.interpret or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def _options() -> dict[str, bool]:
    """A product and a sum are one instruction where they can be. That has been Triton's own choice and will not be from
    3.10 on: it would change what kernels cost, and their last bits, with a new Triton."""
    if knobs.runtime.interpret:
        return {}
    return {"enable_fp_fusion": True, **({"launch_pdl": True} if OVERLAPS.value else {})}


OVERLAPS = tl.constexpr(_overlaps())
OPTIONS = _options()
"""Of every launch."""


@triton.jit
def let_next_start():
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait():
    """For the kernel before."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def waited(step):
    """0, as soon as the kernel before has ended. What lies at an address that this was added to is read after that; a
    loop's other loads are not held up. It says nothing of what is read elsewhere: `wait` still has to come."""
    if OVERLAPS:
        # Called pure, so that a loop may run it ahead; that it takes the step keeps it in the loop.
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; and.b32 $0, $1, 0;", "=r,r", [step], dtype=tl.int32, is_pure=True, pack=1
        )
        return tl.multiple_of(zero, 64)
    else:
        return 0


@triton.jit
def follow():
    let_next_start()
    wait()
