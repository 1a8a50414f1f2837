"""Tokens to vectors. The table may be packed: only the rows asked for are unpacked."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headlong.quant.format import Weight


class Embedding:
    """`weight` may serve as the lm_head too."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self.weight = weight
        self.dtype = dtype

    def __call__(self, tokens_N: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return F.embedding(tokens_N, self.weight).to(self.dtype)
        return self.weight.dequantize_rows(tokens_N).to(self.dtype)
