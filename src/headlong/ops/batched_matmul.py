"""Many small matrix products whose bits do not depend on how many there are, nor on a row's place.

torch's batched product is used where this machine's BLAS is measured to behave, which is once per shape; where
it does not, the product is built of elementwise operations, which cannot differ.
"""

from functools import cache

import torch
from torch import Tensor

from headlong.ops.trial import factors

PROBE_BATCHES = (2, 3, 5, 8, 16, 33, 64)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Computes a @ b over leading dimensions that broadcast. A `b` that is a transposed view counts as another
    shape."""
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    transposed = b.stride(-1) != 1
    if a.device.type != "cpu":
        return a @ b
    if _is_invariant(rows, inner, columns, a.dtype, transposed, torch.get_num_threads()):
        return a @ b
    return _elementwise(a, b)


def _elementwise(a: Tensor, b: Tensor) -> Tensor:
    """Adds up the products over the inner dimension, one after the other."""
    out = a[..., 0:1] * b[..., 0:1, :]
    for i in range(1, a.shape[-1]):
        out = out + a[..., i : i + 1] * b[..., i : i + 1, :]
    return out


@cache
def _is_invariant(rows: int, inner: int, columns: int, dtype: torch.dtype, transposed: bool, _: int) -> bool:
    """What is found holds for as many threads as torch has."""
    most = max(PROBE_BATCHES)
    a, b = factors((most, rows, inner), (most, columns, inner), dtype)
    b = b.transpose(1, 2) if transposed else b.transpose(1, 2).contiguous()
    alone = torch.cat([a[i : i + 1] @ b[i : i + 1] for i in range(most)])
    turned = a.flip(1)
    return all(
        torch.equal(a[:count] @ b[:count], alone[:count])
        and torch.equal((turned[:count] @ b[:count]).flip(1), alone[:count])
        for count in PROBE_BATCHES
    )
