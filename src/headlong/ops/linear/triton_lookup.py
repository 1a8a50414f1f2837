"""Four-bit codes that stand for the numbers of a table: what they stand for, rounded to what is multiplied in.

Four codes are looked up at once, each of them a byte of a register, by instructions that pick bytes from a register by
number: numbers of two bytes are two tables of bytes, and each half of a table is its own. Where there is no such number
(float32, the interpreter) it is picked from the sixteen one after the other.

Legend. TABLE is one of the tables below, `dtype` what is multiplied in.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton import knobs

from headlong.quant.bitsandbytes import FP4_TABLE, NF4_TABLE

FP4_UNIT = 192
"""What the numbers of fp4 are multiplied by to be whole, so that sixteen bits hold them; scales make up for it."""
NUMBERS: dict[str, tuple[float, ...]] = {
    "nf4": NF4_TABLE,
    "fp4": tuple(float(round(FP4_UNIT * number)) for number in FP4_TABLE),
}
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


def lookup_asm(numbers: Sequence[float], dtype: torch.dtype, half: int) -> str:
    """Instructions that turn the lower or higher halves of four bytes in $2 into two numbers in $0 and two in $1."""
    words = [number & 0xFFFF for number in torch.tensor(numbers).to(dtype).view(torch.int16).tolist()]

    def table(shift: int, first: int) -> int:
        return sum((words[first + at] >> shift & 255) << 8 * at for at in range(4))

    lines = [
        ".reg .b32 code, place, upper, low, high, other, begin, end;",
        f"shr.u32 code, $2, {4 * half};",
        "and.b32 code, code, 0x0f0f0f0f;",
        "and.b32 place, code, 0x07070707;",
        "shr.u32 other, place, 4;",
        "or.b32 place, place, other;",
        "prmt.b32 place, place, 0, 0x4420;",
        "shl.b32 upper, code, 4;",
        "prmt.b32 upper, upper, 0, 0xba98;",
    ]
    for name, shift in (("low", 0), ("high", 8)):
        for found, first in ((name, 0), ("other", 8)):
            lines += [
                f"mov.b32 begin, {table(shift, first):#010x};",
                f"mov.b32 end, {table(shift, first + 4):#010x};",
                f"prmt.b32 {found}, begin, end, place;",
            ]
        lines.append(f"lop3.b32 {name}, upper, other, {name}, 0xca;")
    lines += ["prmt.b32 $0, low, high, 0x5140;", "prmt.b32 $1, low, high, 0x7362;"]
    return "{\n" + "\n".join(f"    {line}" for line in lines) + "\n}"


def _both_halves(name: str, dtype: torch.dtype) -> tuple[tl.constexpr, tl.constexpr]:
    return tl.constexpr(lookup_asm(NUMBERS[name], dtype, 0)), tl.constexpr(
        lookup_asm(NUMBERS[name], dtype, 1)
    )


_NF4_BFLOAT_LOW, _NF4_BFLOAT_HIGH = _both_halves("nf4", torch.bfloat16)
_NF4_HALF_LOW, _NF4_HALF_HIGH = _both_halves("nf4", torch.float16)
_FP4_BFLOAT_LOW, _FP4_BFLOAT_HIGH = _both_halves("fp4", torch.bfloat16)
_FP4_HALF_LOW, _FP4_HALF_HIGH = _both_halves("fp4", torch.float16)
_NF4_NUMBERS = tl.constexpr(NUMBERS["nf4"])
_FP4_NUMBERS = tl.constexpr(NUMBERS["fp4"])


@triton.jit
def nf4(codes, half: tl.constexpr, dtype: tl.constexpr):
    """The numbers of nf4."""
    if INTERPRETED or dtype == tl.float32:
        return _picked(codes, half, _NF4_NUMBERS)
    elif dtype == tl.bfloat16:
        asm: tl.constexpr = _NF4_BFLOAT_HIGH if half else _NF4_BFLOAT_LOW
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        asm: tl.constexpr = _NF4_HALF_HIGH if half else _NF4_HALF_LOW
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def fp4(codes, half: tl.constexpr, dtype: tl.constexpr):
    """The numbers of fp4, times FP4_UNIT."""
    if INTERPRETED or dtype == tl.float32:
        return _picked(codes, half, _FP4_NUMBERS)
    elif dtype == tl.bfloat16:
        asm: tl.constexpr = _FP4_BFLOAT_HIGH if half else _FP4_BFLOAT_LOW
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        asm: tl.constexpr = _FP4_HALF_HIGH if half else _FP4_HALF_LOW
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def _picked(codes, half: tl.constexpr, TABLE: tl.constexpr):
    field = (codes >> 4 * half) & 15
    found = tl.zeros(codes.shape, tl.float32)
    for code in tl.static_range(16):
        found = tl.where(field == code, TABLE[code], found)
    return found
