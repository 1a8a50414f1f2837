"""Mixture of experts for tokens in any number: only routed experts are multiplied. Batch-invariant as long as
the experts' linears are: a token's experts are added in ascending order, whoever else is in the batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headlong.ops.elementwise import sigmoid, softplus
from headlong.ops.moe.routing import SMALL, Routing
from headlong.ops.moe.weights import MoeWeights
from headlong.ops.norm.normed import Norm, Normed, whole


def route(
    router_logits_NE: Tensor,
    routing: Routing,
    bias_E: Tensor | None = None,
    chosen_NA: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token and their weights, both [N, num_active]. Those that are `chosen_NA` are not
    looked for."""
    wide = torch.promote_types(router_logits_NE.dtype, torch.float32)
    by_softmax = routing.scores == "softmax"
    if by_softmax:
        scores_NE = torch.softmax(router_logits_NE, dim=-1, dtype=wide)
    elif routing.scores == "sigmoid":
        scores_NE = sigmoid(router_logits_NE.to(wide))
    else:
        scores_NE = softplus(router_logits_NE.to(wide)).sqrt_()
    experts = _choose(scores_NE, routing, bias_E) if chosen_NA is None else chosen_NA
    weights = scores_NE.gather(-1, experts)
    if routing.normalise:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total if by_softmax else total + SMALL)
    return experts, weights if routing.scale == 1.0 else weights * routing.scale


def _choose(scores_NE: Tensor, routing: Routing, bias_E: Tensor | None) -> Tensor:
    choice_NE = scores_NE if bias_E is None else scores_NE + bias_E.to(scores_NE.dtype)
    if routing.is_grouped:
        choice_NE = _kept(choice_NE, routing)
    return _best(choice_NE, routing.num_active)


def _best(scores: Tensor, count: int) -> Tensor:
    """The numbers of the largest, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _kept(choice_NE: Tensor, routing: Routing) -> Tensor:
    """The choices, without those of groups that are left out."""
    choice_NGS = choice_NE.unflatten(-1, (routing.num_groups, -1))
    groups_NG = choice_NGS.gather(-1, _best(choice_NGS, 2)).sum(-1)
    kept_NG = torch.zeros_like(groups_NG, dtype=torch.bool).scatter_(
        -1, _best(groups_NG, routing.kept_groups), True
    )
    return choice_NGS.masked_fill(~kept_NG[..., None], -torch.inf).flatten(-2)


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

    def __init__(self, experts: Sequence[Callable[[Tensor], Tensor]], weights: MoeWeights) -> None:
        self.experts = experts
        self.routing = weights.routing
        self.bias_E = weights.bias_E
        self.is_gated = weights.is_gated

    def __call__(
        self,
        given: Normed,
        logits_NR: Tensor,
        shared_ND: Tensor | None,
        residual_ND: Tensor,
        then: Norm,
        chosen_NA: Tensor | None = None,
    ) -> tuple[Tensor, Normed]:
        """Adds the experts' outputs to `residual_ND`, and applies `then`."""
        x_ND, count = whole(given), len(self.experts)
        experts_NA, weights_NA = route(logits_NR[:, :count], self.routing, self.bias_E, chosen_NA)
        routed_ND = moe(x_ND, experts_NA, weights_NA, self.experts)
        if shared_ND is not None and self.is_gated:
            shared_ND = shared_ND * sigmoid(logits_NR[:, count:].to(routed_ND.dtype))
        out_ND = residual_ND + (routed_ND if shared_ND is None else routed_ND.add_(shared_ND))
        return out_ND, then(out_ND)
