"""The embedding, from tokens to vectors. The table may be packed: only the rows asked for are unpacked."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headlong.ops.linear.linear import Linear, Shard
from headlong.quant.format import Weight
from headlong.quant.plain import PlainWeight


class ReferenceEmbedding:
    """`weight` may serve as the lm_head too."""

    shard: Shard = Shard.NONE

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self.weight = weight
        self.dtype = dtype
        self._rows = weight.weight_OD if isinstance(weight, PlainWeight) else weight

    @property
    def asks_host(self) -> bool:
        """Whether the host has to know which rows are wanted, as it does for a packed table; floats of another dtype
        than is computed in are none."""
        return not isinstance(self._rows, Tensor)

    def __call__(self, tokens_N: Tensor) -> Tensor:
        if isinstance(self._rows, Tensor):
            return F.embedding(tokens_N, self._rows).to(self.dtype)
        return self._rows.dequantize_rows(tokens_N).to(self.dtype)

    def lm_head(self, make: Callable[[Weight], Linear]) -> Linear:
        return make(self.weight)
