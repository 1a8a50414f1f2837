"""Sums whose order is fixed, so that their bits depend on nothing but what is added.

torch's own sums choose an order by shape, and zeros at the end of a longer one may change it.
"""

import torch.nn.functional as F
from torch import Tensor


def sum_in_order(parts: Tensor, dim: int) -> Tensor:
    """Adds up a dimension from first to last: zeros at its end leave the sum as it is."""
    total, *rest = parts.unbind(dim)
    for part in rest:
        total = total + part
    return total


def halving_sum(x: Tensor, dim: int) -> Tensor:
    """Adds up a dimension by adding its second half to its first until one is left, in as many steps as its length has
    bits. The order depends on the length alone."""
    x = x.movedim(dim, 0)
    while (count := x.shape[0]) > 1:
        half = (count + 1) // 2
        rest = x[half:]
        if count % 2:
            rest = F.pad(rest, (0, 0) * (x.dim() - 1) + (0, 1))
        x = x[:half] + rest
    return x[0]
