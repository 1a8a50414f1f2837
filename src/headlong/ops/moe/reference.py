"""Mixture of experts for tokens in any number: only routed experts are multiplied. Batch-invariant as long as
the experts' linears are: a token's experts are added in ascending order, whoever else is in the batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headlong.ops.elementwise import sigmoid
from headlong.ops.norm.normed import Norm, Normed, whole


def route(router_logits_NE: Tensor, num_active: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token and their weights, both [N, num_active]."""
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


class ReferenceExperts:
    """A layer's experts, each routed expert a feed-forward of its own; the host asks which tokens are whose."""

    name = "reference"
    has_shared = False

    def __init__(
        self, experts: Sequence[Callable[[Tensor], Tensor]], num_active: int, *, normalise: bool
    ) -> None:
        self.experts = experts
        self.num_active = num_active
        self.normalise = normalise

    def __call__(
        self, given: Normed, logits_NR: Tensor, shared_ND: Tensor | None, residual_ND: Tensor, then: Norm
    ) -> tuple[Tensor, Normed]:
        """Adds the experts' outputs to `residual_ND`, and applies `then`."""
        assert shared_ND is not None
        x_ND, count = whole(given), len(self.experts)
        experts_NA, weights_NA = route(logits_NR[:, :count], self.num_active, self.normalise)
        routed_ND = moe(x_ND, experts_NA, weights_NA, self.experts)
        out_ND = residual_ND + routed_ND.add_(shared_ND * sigmoid(logits_NR[:, count:].to(routed_ND.dtype)))
        return out_ND, then(out_ND)
