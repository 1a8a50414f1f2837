"""Which entries each token attends to, in plain torch: exact, and of equal scores the earlier entry.

    score(entry) = scale · Σ_h gate_h · relu(query_h · entry)

over all entries that have ended by the token's position. While there are no more of them than are chosen, nothing is
scored.
"""

import torch
from torch import Tensor

from headlong.ops.batched_matmul import matmul
from headlong.ops.compressed_attention.entries import MAX_GATHER, gathered, num_ended
from headlong.ops.indexer.weights import IndexerSizes
from headlong.ops.ordered_sum import halving_sum
from headlong.ops.places import Places
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.pairs import turn_of, turned
from headlong.ops.rope.reference import Angles


class ReferenceIndexer:
    """An indexer that other backends are tested against."""

    name = "reference"

    def __init__(self, sizes: IndexerSizes) -> None:
        self.sizes = sizes

    def __call__(
        self, queries: Tensor, gates_NH: Tensor, entries: Tensor, angles: Angles, step: PreparedStep
    ) -> Tensor:
        s, places = self.sizes, step.places
        ended_N = num_ended(places, s.ratio)
        most = int(ended_N.max())
        number_E = torch.arange(most, device=queries.device)
        if most <= s.top_k:
            return torch.where(number_E < ended_N[:, None], number_E, -1)
        q_NHD = turned(queries.view(len(queries), s.num_heads, -1), turn_of(angles, s.rope))
        chosen = queries.new_empty(len(queries), s.top_k, dtype=torch.long)
        each = max(1, MAX_GATHER // (most * s.head_dim))
        for tokens_M in torch.arange(len(queries), device=queries.device).split(each):
            scores_ME = self._scores(q_NHD[tokens_M], gates_NH[tokens_M], entries, places, tokens_M, most)
            scores_ME.masked_fill_(number_E >= ended_N[tokens_M, None], -torch.inf)
            best_MK = scores_ME.sort(dim=-1, descending=True, stable=True).indices[:, : s.top_k]
            best_MK = best_MK.masked_fill(best_MK >= ended_N[tokens_M, None], most).sort(dim=-1).values
            chosen[tokens_M] = best_MK.masked_fill(best_MK == most, -1)
        return chosen

    def _scores(
        self, q_MHD: Tensor, gates_MH: Tensor, entries: Tensor, places: Places, tokens_M: Tensor, most: int
    ) -> Tensor:
        number_ME = torch.arange(most, device=q_MHD.device).expand(len(tokens_M), -1)
        keys, _ = gathered(entries, places, tokens_M, number_ME, self.sizes.ratio)
        products = matmul(q_MHD[:, None], keys.to(q_MHD.dtype).transpose(-1, -2))  # [M, parts, H, PART]
        weighted = products.relu_() * gates_MH[:, None, :, None]
        scores = halving_sum(weighted, 2) * self.sizes.scale
        return scores.flatten(1)[:, :most]
