"""Unpacks a weight's codes into the numbers they stand for, exact in bfloat16, with few instructions: unpacking must
keep up with memory. Scales are not part of it.

A code shares its word with another, each of one half of a step's columns, so that a thread finds the codes of
neighbouring columns side by side in a register and unpacks two at a time.

Legend. ENCODING is one of FLOAT, E4M3, INTEGER, NIBBLE, E2M1, NF4 and FP4, ZERO_POINT the code of 0, DTYPE what is
multiplied in. The numbers of NF4 are no exact ones of sixteen bits and are rounded to DTYPE, as bitsandbytes does.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton import knobs

from headlong.ops.linear.triton_lookup import fp4, nf4
from headlong.ops.triton_launch import CONVERTS_E4M3

FLOAT, E4M3, INTEGER, NIBBLE, E2M1, NF4, FP4 = range(7)
"""Encodings of a weight's codes. All but floats come two to a word, one of each half of a step's columns."""
_FLOAT = tl.constexpr(FLOAT)
_E4M3 = tl.constexpr(E4M3)
_NIBBLE = tl.constexpr(NIBBLE)
_E2M1 = tl.constexpr(E2M1)
_NF4 = tl.constexpr(NF4)
_FP4 = tl.constexpr(FP4)
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_2_TO_120 = tl.constexpr(2.0**120)
_2_TO_126 = tl.constexpr(2.0**126)

# Sign, exponent and mantissa of two e4m3 where bfloat16 has them, 4 bits lower than where they come from; then only the
# exponent's bias is wrong, by 2^120. Also for numbers below the normal ones. Products and differences are those of one
# instruction that does both, which GPUs have had for longer.
_BFLOAT_LOW = tl.constexpr("""{
    .reg .b32 sign, rest, factor, nothing;
    shl.b32 sign, $1, 8;
    shl.b32 rest, $1, 4;
    and.b32 rest, rest, 0x07f007f0;
    lop3.b32 rest, sign, 0x80008000, rest, 0xea;
    mov.b32 factor, 0x7b807b80;
    mov.b32 nothing, 0x80008000;
    fma.rn.bf16x2 $0, rest, factor, nothing;
}""")
_BFLOAT_HIGH = tl.constexpr("""{
    .reg .b32 rest, factor, nothing;
    shr.u32 rest, $1, 4;
    and.b32 rest, rest, 0x07f007f0;
    lop3.b32 rest, $1, 0x80008000, rest, 0xea;
    mov.b32 factor, 0x7b807b80;
    mov.b32 nothing, 0x80008000;
    fma.rn.bf16x2 $0, rest, factor, nothing;
}""")
_HALF_LOW = tl.constexpr("""{
    .reg .b32 both;
    .reg .b16 low, high;
    prmt.b32 both, $1, 0, 0x3120;
    mov.b32 {low, high}, both;
    cvt.rn.f16x2.e4m3x2 $0, low;
}""")
_HALF_HIGH = tl.constexpr("""{
    .reg .b32 both;
    .reg .b16 low, high;
    prmt.b32 both, $1, 0, 0x3120;
    mov.b32 {low, high}, both;
    cvt.rn.f16x2.e4m3x2 $0, high;
}""")
# The lower seven bits of a number of eight make 128 + them a bfloat16, from which 128 is taken again, or 256 if the
# eighth bit says that it is below 0.
_INTEGER_LOW = tl.constexpr("""{
    .reg .b32 rest, base, less;
    lop3.b32 rest, $1, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 base, $1, 0x00800080, 0x43004300, 0xea;
    mov.b32 less, 0xbf80bf80;
    fma.rn.bf16x2 $0, base, less, rest;
}""")
_INTEGER_HIGH = tl.constexpr("""{
    .reg .b32 high, rest, base, less;
    shr.u32 high, $1, 8;
    lop3.b32 rest, high, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 base, high, 0x00800080, 0x43004300, 0xea;
    mov.b32 less, 0xbf80bf80;
    fma.rn.bf16x2 $0, base, less, rest;
}""")


@triton.jit
def decode(codes, half: tl.constexpr, ENCODING: tl.constexpr, ZERO_POINT: tl.constexpr, DTYPE: tl.constexpr):
    """Unpacks the numbers of one half of a step's columns, exact in bfloat16; floats stay as they are."""
    if ENCODING == _FLOAT:
        return codes
    elif ENCODING == _NIBBLE:
        return ((codes >> 4 * half) & 15).to(tl.float32) - ZERO_POINT
    elif ENCODING == _E2M1:
        field = (codes >> 4 * half).to(tl.uint32)
        # Sign, exponent and mantissa where float32 has them; then only the exponent's bias is wrong.
        return (((field & 8) << 28) | ((field & 7) << 22)).to(tl.float32, bitcast=True) * _2_TO_126
    elif ENCODING == _NF4:
        return nf4(codes, half, DTYPE)
    elif ENCODING == _FP4:
        return fp4(codes, half, DTYPE)
    elif ENCODING == _E4M3:
        return _e4m3(codes, half, DTYPE)
    else:
        return _integer(codes, half, ZERO_POINT, DTYPE)


@triton.jit
def _e4m3(codes, half: tl.constexpr, dtype: tl.constexpr):
    if INTERPRETED or dtype == tl.float32 or (dtype == tl.float16 and not CONVERTS_E4M3):
        field = (codes >> 8 * half).to(tl.uint32)
        return (((field & 0x80) << 24) | ((field & 0x7F) << 20)).to(tl.float32, bitcast=True) * _2_TO_120
    elif dtype == tl.bfloat16:
        asm: tl.constexpr = _BFLOAT_HIGH if half else _BFLOAT_LOW
        return tl.inline_asm_elementwise(asm, "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        asm: tl.constexpr = _HALF_HIGH if half else _HALF_LOW
        return tl.inline_asm_elementwise(asm, "=r,r", [codes], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _integer(codes, half: tl.constexpr, ZERO_POINT: tl.constexpr, dtype: tl.constexpr):
    if INTERPRETED or dtype != tl.bfloat16 or ZERO_POINT != 0:
        signed = codes >> 8 if half else (codes << 8) >> 8
        return signed.to(tl.float32) - ZERO_POINT
    else:
        asm: tl.constexpr = _INTEGER_HIGH if half else _INTEGER_LOW
        return tl.inline_asm_elementwise(asm, "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2)
