"""Mixture of experts for tokens in any number: only routed experts are multiplied. Batch-invariant as long as
the experts' linears are: a token's experts are added in ascending order, whoever else is in the batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def route(router_logits_NE: Tensor, num_active: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, both [N, num_active]."""
    wide = torch.promote_types(router_logits_NE.dtype, torch.float32)
    probs = torch.softmax(router_logits_NE, dim=-1, dtype=wide)
    weights, experts = torch.topk(probs, num_active, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


def moe(
    x_ND: Tensor, experts_NA: Tensor, weights_NA: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    out = torch.zeros_like(x_ND, dtype=weights_NA.dtype)
    for expert in experts_NA.unique().tolist():
        token, rank = torch.where(experts_NA == expert)
        out[token] += experts[expert](x_ND[token]) * weights_NA[token, rank, None]
    return out
