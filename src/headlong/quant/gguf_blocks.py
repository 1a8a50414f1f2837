"""How the bytes of one GGUF block become numbers: a function for each block type, over many blocks at once.

Every type is whole numbers (codes) times a scale for each group of them, most with an offset. The functions take
blocks [N, bytes] as uint8 and return the codes [N, groups, width], the groups' scales and their offsets or None;
`unpack` multiplies in float32, one rounding for each operation, as the definition of the types
does. Knows nothing of rows, of matrices or of files.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from headlong.quant import gguf_grids
from headlong.quant.gguf_factors import Factor, Unpacked, half

_EACH_BYTE = 0x0101010101010101
_DIAGONAL = 0x8040201008040201 - 2**64
"""A word whose byte i has bit i set and no other, as a signed number."""
_TWO_BITS = (0, 2, 4, 6)
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def unpack(blocks: Tensor, type_name: str) -> Tensor:
    """Blocks [N, bytes] as float32 [N, elements]; the bytes of each block lie together, at an even offset."""
    codes, scale, offset = fields(blocks, type_name)
    values = codes.to(torch.float32).mul_(scale.value_NG[..., None])
    if offset is not None:
        values.add_(offset.value_NG[..., None])
    return values.flatten(1)


def fields(blocks: Tensor, type_name: str) -> Unpacked:
    """Codes, scales and offsets of blocks [N, bytes]; codes may be floats that are whole numbers."""
    return _UNPACKERS[type_name](blocks)


def _fields(blocks: Tensor, first: int, last: int, width: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """The bit fields of the bytes [first, last). Bytes come in runs of `width`; all first fields of a run come before
    its second ones.

    Returns uint8 [N, (last - first) / width, len(shifts), width]. Works on eight bytes at a time: what a shift
    drags in from the neighbouring byte is masked away.
    """
    # A clone, because eight bytes at once need their alignment; `contiguous` would not copy a single block.
    packed = blocks[:, first:last].clone(memory_format=torch.contiguous_format)
    lanes = packed.view(torch.int64).view(len(blocks), (last - first) // width, width // 8)
    shape = (len(blocks), lanes.shape[1], len(shifts), width // 8)
    fields = torch.empty(shape, dtype=torch.int64, device=blocks.device)
    for i, shift in enumerate(shifts):
        torch.bitwise_right_shift(lanes, shift, out=fields[:, :, i])
    return fields.bitwise_and_(mask * _EACH_BYTE).view(torch.uint8)


def _nibbles(blocks: Tensor, first: int, width: int, groups: int) -> Tensor:
    """4-bit codes [N, groups, …] from byte `first` to the end: a run's low halves, then its high halves."""
    codes = _fields(blocks, first, blocks.shape[1], width, (0, 4), 0x0F)
    return codes.view(len(blocks), groups, 2 * (blocks.shape[1] - first) // groups)


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """Bit i of the four bytes at `first` as 16 or 0 for element i: [N, 1, 32]."""
    spread = blocks[:, first : first + 4].to(torch.int64).mul_(_EACH_BYTE).bitwise_and_(_DIAGONAL)
    return spread.view(torch.uint8).ne(0).view(torch.uint8).bitwise_left_shift_(4).view(len(blocks), 1, 32)


def _signed(codes: Tensor, zero: int) -> Tensor:
    """The codes minus their zero point, as int8, computed in place."""
    return codes.view(torch.int8).sub_(zero)


def _q4_0(blocks: Tensor) -> Unpacked:
    return _signed(_nibbles(blocks, 2, 16, 1), 8), Factor(half(blocks, 0)), None


def _q4_1(blocks: Tensor) -> Unpacked:
    return _nibbles(blocks, 4, 16, 1), Factor(half(blocks, 0)), Factor(half(blocks, 2))


def _q5_0(blocks: Tensor) -> Unpacked:
    codes = _nibbles(blocks, 6, 16, 1).bitwise_or_(_fifth_bits(blocks, 2))
    return _signed(codes, 16), Factor(half(blocks, 0)), None


def _q5_1(blocks: Tensor) -> Unpacked:
    codes = _nibbles(blocks, 8, 16, 1).bitwise_or_(_fifth_bits(blocks, 4))
    return codes, Factor(half(blocks, 0)), Factor(half(blocks, 2))


def _q8_0(blocks: Tensor) -> Unpacked:
    return blocks[:, None, 2:].view(torch.int8), Factor(half(blocks, 0)), None


def _q2_k(blocks: Tensor) -> Unpacked:
    """The block's bytes are 16 of scales and minima (4 bits each), 64 of codes, d, dmin."""
    codes = _fields(blocks, 16, 80, 32, _TWO_BITS, 0x03).view(len(blocks), 16, 16)
    scales = blocks[:, :16]
    return codes, Factor(half(blocks, 80), scales & 0x0F), Factor(-half(blocks, 82), scales >> 4)


def _q3_k(blocks: Tensor) -> Unpacked:
    """The block's bytes are 32 of high bits, 64 of low bits, 12 of scales, d."""
    codes = _fields(blocks, 32, 96, 32, _TWO_BITS, 0x03).view(len(blocks), 16, 16)
    high = _fields(blocks, 0, 32, 32, tuple(range(8)), 0x01).view(len(blocks), 16, 16)
    codes.bitwise_or_(high.bitwise_left_shift_(2))
    # 16 scales of 6 bits: the low four in 8 bytes, the high two in 4 bytes, both by rank and not side by side.
    low, top = blocks[:, 96:104], blocks[:, 104:108]
    scales = torch.cat((low & 0x0F, low >> 4), 1)
    scales |= (torch.cat([top >> shift for shift in _TWO_BITS], 1) & 0x03) << 4
    return _signed(codes, 4), Factor(half(blocks, 108), _signed(scales, 32)), None


def _q4_k(blocks: Tensor) -> Unpacked:
    """The block's bytes are d, dmin, 12 of scales and minima, 128 of codes."""
    return _nibbles(blocks, 16, 32, 8), *_scales_and_minima(blocks)


def _q5_k(blocks: Tensor) -> Unpacked:
    """The block's bytes are d, dmin, 12 of scales and minima, 32 of high bits, 128 of low bits."""
    high = _fields(blocks, 16, 48, 32, tuple(range(8)), 0x01).view(len(blocks), 8, 32)
    codes = _nibbles(blocks, 48, 32, 8).bitwise_or_(high.bitwise_left_shift_(4))
    return codes, *_scales_and_minima(blocks)


def _scales_and_minima(blocks: Tensor) -> tuple[Factor, Factor]:
    """The 8 scales and 8 minima of 6 bits that Q4_K and Q5_K keep in 12 bytes.

    The first four of each take the low six bits of a byte; the last four take a half of the third four bytes and
    the two bits left over above.
    """
    scales, minima, halves = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six_s = torch.cat((scales & 0x3F, (halves & 0x0F) | ((scales >> 2) & 0x30)), 1)
    six_m = torch.cat((minima & 0x3F, (halves >> 4) | ((minima >> 2) & 0x30)), 1)
    return Factor(half(blocks, 0), six_s), Factor(-half(blocks, 2), six_m)


def _q6_k(blocks: Tensor) -> Unpacked:
    """The block's bytes are 128 of low bits, 64 of high bits, 16 of scales (8 bits each), d."""
    codes = _fields(blocks, 0, 128, 64, (0, 4), 0x0F).view(len(blocks), 16, 16)
    high = _fields(blocks, 128, 192, 32, _TWO_BITS, 0x03).view(len(blocks), 16, 16)
    codes.bitwise_or_(high.bitwise_left_shift_(4))
    return _signed(codes, 32), Factor(half(blocks, 208), blocks[:, 192:208].view(torch.int8)), None


@lru_cache
def _iq4_table(device: torch.device) -> Tensor:
    return torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=device)


def _iq4(codes: Tensor) -> Tensor:
    """The values that 4-bit codes stand for, as float32."""
    return _iq4_table(codes.device).index_select(0, codes.view(-1).int()).view(codes.shape)


def _iq4_nl(blocks: Tensor) -> Unpacked:
    return _iq4(_nibbles(blocks, 2, 16, 1)), Factor(half(blocks, 0)), None


def _iq4_xs(blocks: Tensor) -> Unpacked:
    """The block's bytes are d, 2 of the scales' high bits, 4 of their low bits, 128 of codes."""
    low, top = blocks[:, 4:8], blocks[:, 2:4]
    scales = torch.stack((low & 0x0F, low >> 4), -1).view(-1, 8)
    scales |= (torch.stack([top >> shift for shift in _TWO_BITS], -1).view(-1, 8) & 0x03) << 4
    return _iq4(_nibbles(blocks, 8, 16, 8)), Factor(half(blocks, 0), _signed(scales, 32)), None


_UNPACKERS: dict[str, Callable[[Tensor], Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ1_S": gguf_grids.iq1_s,
    "IQ1_M": gguf_grids.iq1_m,
    "IQ2_XXS": gguf_grids.iq2_xxs,
    "IQ2_XS": gguf_grids.iq2_xs,
    "IQ2_S": gguf_grids.iq2_s,
    "IQ3_XXS": gguf_grids.iq3_xxs,
    "IQ3_S": gguf_grids.iq3_s,
    "TQ1_0": gguf_grids.tq1_0,
    "TQ2_0": gguf_grids.tq2_0,
    "MXFP4": gguf_grids.mxfp4,
}
