"""The embedding as rows of a weight laid out for the native GEMM: it may serve as the lm_head too, held once."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from headlong.ops import native
from headlong.ops.linear.linear import Linear, Shard
from headlong.ops.linear.native import NativeLinear
from headlong.quant.format import Weight


class NativeEmbedding:
    asks_host = False
    shard: Shard = Shard.NONE

    def __init__(self, linear: NativeLinear) -> None:
        (self._panels,) = linear.panels
        self.linear = linear
        self.num_tokens = linear.out_features

    def __call__(self, tokens_N: Tensor) -> Tensor:
        tokens_N = tokens_N.contiguous()
        assert tokens_N.dtype == torch.long
        out = torch.empty(len(tokens_N), self.linear.in_features)
        native.kernel("headlong_embed")(
            ctypes.addressof(self._panels.struct),
            tokens_N.data_ptr(),
            len(tokens_N),
            out.data_ptr(),
            native.num_threads(),
        )
        return out

    def lm_head(self, make: Callable[[Weight], Linear]) -> Linear:  # noqa: ARG002 - held as one
        return self.linear
