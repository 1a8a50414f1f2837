"""Triton's kernels as the registry asks for them. Imported only where they are to serve: Triton may be missing."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headlong.ops.argmax.triton import argmax
from headlong.ops.delta_net.triton import TritonDeltaNet
from headlong.ops.draw.triton import draw
from headlong.ops.draw.triton_sample import sample
from headlong.ops.gated_attention.triton import TritonGatedAttention
from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_projection import TritonProjection
from headlong.ops.moe.triton import TritonExperts
from headlong.ops.norm.triton import TritonRmsNorm
from headlong.ops.penalise.triton import penalise
from headlong.ops.silu_mul.triton import silu_mul
from headlong.quant.format import Weight

__all__ = [
    "TritonDeltaNet",
    "TritonExperts",
    "TritonGatedAttention",
    "TritonLinear",
    "TritonRmsNorm",
    "argmax",
    "draw",
    "linear",
    "penalise",
    "projection",
    "sample",
    "silu_mul",
]


def linear(
    weights: Sequence[Weight], order: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> TritonLinear | str:
    """Or the reason why these weights need another. Packed ones are multiplied in `dtype`."""
    return _refusal(weights) or TritonLinear(weights, order, bias, dtype=dtype)


def projection(
    weights: Sequence[Weight], order: Tensor | None, bias: Tensor | None, gates: slice, dtype: torch.dtype
) -> TritonProjection | str:
    """The same, where outputs `gates` are needed last."""
    return _refusal(weights) or TritonProjection(weights, order, bias, gates, dtype)


def _refusal(weights: Sequence[Weight]) -> str | None:
    return next((reason for weight in weights if (reason := TritonLinear.supports(weight)) is not None), None)
