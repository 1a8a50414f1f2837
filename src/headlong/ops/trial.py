"""Factors for trials that ask whether two ways to multiply give the same bits.

Of random factors 16-bit results hardly tell: two orders of a sum in float32 differ in its last bits, which nearly
always round away. So every second product's terms cancel but for what rounding leaves, which any other order changes,
and which every dtype shows whole. Terms are of very different sizes, since 16-bit factors of like size add up without
rounding.
"""

import torch
from torch import Tensor


def factors(rows: tuple[int, ...], weights: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns random tensors of these shapes, whose last dimension is the one to sum over. Products with the first, the
    third, ... part of the `rows` cancel."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    a, b = (torch.randn(*shape, generator=generator, dtype=wide) for shape in (rows, weights))
    a *= torch.randint(-10, 5, rows, generator=generator).to(wide).exp2()
    order = torch.randperm(rows[-1], generator=generator)
    first, second, left = order.tensor_split((len(order) // 2, len(order) // 2 * 2))
    b[..., second] = -b[..., first]
    a[0::2, ..., second] = a[0::2, ..., first]
    a[0::2, ..., left] = 0.0
    return a.to(dtype), b.to(dtype)
