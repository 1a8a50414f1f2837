"""GGUF block types whose codes are points of a grid: IQ1, IQ2 and IQ3; and the types of three values (TQ) and MXFP4.

A few bits number a point of four or eight magnitudes; others number its signs. The grids are those of the `gguf`
package. Functions take blocks [N, bytes] and return codes, scales and offsets as in `gguf_blocks.py`, whole numbers
throughout: the steps of an eighth by which IQ1 moves its points are part of the codes. Knows nothing of rows.
"""

from functools import lru_cache

import torch
from torch import Tensor

from headlong.quant.gguf_factors import Factor, Unpacked, half

_DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@lru_cache
def _grid(name: str, device: torch.device) -> Tensor:
    """The points of a type's grid, int8 [points, magnitudes]."""
    import gguf

    kind = getattr(gguf.quants, name)
    kind.init_grid()
    return torch.from_numpy(kind.grid).view(kind.grid_shape).to(torch.int8).to(device)


@lru_cache
def _signs(device: torch.device) -> Tensor:
    """1 or -1 for each bit of each byte, int8 [256, 8]."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (1 - 2 * bits).to(torch.int8).to(device)


@lru_cache
def _doubled(device: torch.device) -> Tensor:
    return torch.tensor(_DOUBLED_E2M1, dtype=torch.int8, device=device)


def _points(name: str, numbers: Tensor) -> Tensor:
    """The points with these numbers, one after the other: int8 [N, elements]."""
    grid = _grid(name, numbers.device)
    numbers = numbers.flatten(1)
    return grid.index_select(0, numbers.reshape(-1)).view(len(numbers), numbers.shape[1] * grid.shape[1])


def _signed(points: Tensor, signs: Tensor) -> Tensor:
    """The points times 1 or -1 by the bits of `signs` [N, elements / 8]."""
    return points.mul_(_signs(points.device).index_select(0, signs.reshape(-1)).view(points.shape))


def _even(seven: Tensor) -> Tensor:
    """Signs of which seven bits are stored: the eighth makes their number even."""
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    return seven | ((parity ^ parity >> 1) & 1) << 7


def _ints(blocks: Tensor, first: int, last: int, dtype: torch.dtype, mask: int) -> Tensor:
    """The little-endian numbers of some bytes as int32 or int64 [N, count], never below 0."""
    stored = blocks[:, first:last].clone(memory_format=torch.contiguous_format).view(dtype)
    return stored.to(torch.int64 if dtype == torch.int32 else torch.int32) & mask


def _halves(packed: Tensor) -> Tensor:
    """Both halves of each byte, the low one first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def _scaled(blocks: Tensor, codes: Tensor, steps: Tensor, factor: float) -> Unpacked:
    """Codes with the scale d · (2 · steps + 1) · factor by group, all of it exact in float32."""
    odd = steps.float().mul_(2.0).add_(1.0).mul_(factor)
    return codes.view(*steps.shape, 256 // steps.shape[1]), Factor(half(blocks, 0)[:, None] * odd), None


def iq2_xxs(blocks: Tensor) -> Unpacked:
    """The block's bytes are d, then for 32 elements four numbers of points and 32 bits: 4 · 7 of signs, 4 of scale."""
    words = _ints(blocks, 2, 66, torch.int32, 0xFFFFFFFF).view(len(blocks), 8, 2)
    shifts = torch.tensor((0, 8, 16, 24), device=blocks.device)
    numbers = words[..., :1] >> shifts & 255
    signs = _even(words[..., 1:] >> shifts // 8 * 7 & 127)
    return _scaled(blocks, _signed(_points("IQ2_XXS", numbers), signs), words[..., 1] >> 28, 0.125)


def iq2_xs(blocks: Tensor) -> Unpacked:
    """The block's bytes are d, 32 words of a point's number (9 bits) and signs (7), 8 of scales (4 bits each)."""
    words = _ints(blocks, 2, 66, torch.int16, 0xFFFF)
    codes = _signed(_points("IQ2_XS", words & 511), _even(words >> 9))
    return _scaled(blocks, codes, _halves(blocks[:, 66:]), 0.125)


def iq2_s(blocks: Tensor) -> Unpacked:
    """The block's bytes are d, 32 of points' low bits, 32 of signs, 8 of points' high bits, 8 of scales."""
    shifts = torch.tensor((0, 2, 4, 6), device=blocks.device)
    high = (blocks[:, 66:74, None].int() >> shifts & 3).flatten(1)
    codes = _signed(_points("IQ2_S", blocks[:, 2:34].int() | high << 8), blocks[:, 34:66].int())
    return _scaled(blocks, codes, _halves(blocks[:, 74:]), 0.125)


def iq3_xxs(blocks: Tensor) -> Unpacked:
    """The block's bytes are d, 64 numbers of points of four, then for 32 elements 4 · 7 bits of signs, 4 of scale."""
    words = _ints(blocks, 66, 98, torch.int32, 0xFFFFFFFF)
    signs = _even(words[..., None] >> torch.tensor((0, 7, 14, 21), device=blocks.device) & 127)
    codes = _signed(_points("IQ3_XXS", blocks[:, 2:66].int()), signs)
    return _scaled(blocks, codes, words >> 28, 0.25)


def iq3_s(blocks: Tensor) -> Unpacked:
    """The block's bytes are d, 64 of points' low bits, 8 of their high bits, 32 of signs, 4 of scales."""
    high = (blocks[:, 66:74, None].int() >> torch.arange(8, device=blocks.device) & 1).flatten(1)
    codes = _signed(_points("IQ3_S", blocks[:, 2:66].int() | high << 8), blocks[:, 74:106].int())
    return _scaled(blocks, codes, _halves(blocks[:, 106:]), 1.0)


def iq1_s(blocks: Tensor) -> Unpacked:
    """The block's bytes are d, 32 of points' low bits, then for 32 elements 4 · 3 high bits, 3 of scale, 1 of step."""
    words = _ints(blocks, 34, 50, torch.int16, 0xFFFF)
    high = (words[..., None] >> torch.tensor((0, 3, 6, 9), device=blocks.device) & 7).flatten(1)
    points = _points("IQ1_S", blocks[:, 2:34].int() | high << 8).view(len(blocks), 8, 32)
    codes = points.mul_(8).add_((1 - 2 * (words >> 15)).to(torch.int8)[..., None])
    return _scaled(blocks, codes, words >> 12 & 7, 0.125)


def iq1_m_scale(blocks: Tensor) -> Tensor:
    """The float16 d of each block [N], of which each of four words of scales keeps four bits."""
    words = _ints(blocks, 48, 56, torch.int16, 0xF000)
    bits = words[:, 0] >> 12 | words[:, 1] >> 8 | words[:, 2] >> 4 | words[:, 3]
    return bits.to(torch.int16).view(torch.float16)


def iq1_m(blocks: Tensor) -> Unpacked:
    """The block's bytes are 32 of points' low bits, 16 of their high bits and steps, 8 of scales and d."""
    high = _halves(blocks[:, 32:48]).int()
    points = _points("IQ1_S", blocks[:, :32].int() | (high & 7) << 8).view(len(blocks), 32, 8)
    codes = points.mul_(8).add_((1 - (high >> 2 & 2)).to(torch.int8)[..., None])
    words = _ints(blocks, 48, 56, torch.int16, 0xFFFF)
    steps = (words[..., None] >> torch.tensor((0, 3, 6, 9), device=blocks.device) & 7).flatten(1)
    odd = steps.float().mul_(2.0).add_(1.0).mul_(0.125)
    return codes.view(len(blocks), 16, 16), Factor(iq1_m_scale(blocks).float()[:, None] * odd), None


def tq1_0(blocks: Tensor) -> Unpacked:
    """The block's bytes are 52 of five or four digits of base 3, d. A digit is the top of the byte times a power of
    3."""
    digits = []
    for first, last, powers in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        factors = torch.tensor([3**power for power in range(powers)], dtype=torch.uint8, device=blocks.device)
        digits.append((blocks[:, None, first:last] * factors[:, None]).flatten(1))
    codes = torch.cat(digits, 1).to(torch.int16).mul_(3).bitwise_right_shift_(8).sub_(1)
    return codes.to(torch.int8)[:, None], Factor(half(blocks, 52)), None


def tq2_0(blocks: Tensor) -> Unpacked:
    """The block's bytes are 64 of four codes of 2 bits, d."""
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)
    packed = blocks[:, :64].unflatten(1, (2, 1, 32))
    fields = (packed >> shifts[:, None] & 3).view(torch.int8).sub_(1)
    return fields.view(len(blocks), 1, 256), Factor(half(blocks, 64)), None


def mxfp4(blocks: Tensor) -> Unpacked:
    """The block's bytes are a power of two, 16 of codes: floats e2m1, taken twice, and half the power."""
    halves = torch.cat((blocks[:, 1:] & 15, blocks[:, 1:] >> 4), 1)
    codes = _doubled(blocks.device).index_select(0, halves.view(-1).int()).view(len(blocks), 1, 32)
    ones = torch.ones_like(blocks[:, 0], dtype=torch.float32)
    return codes, Factor(torch.ldexp(ones, blocks[:, 0].int() - 128)), None
