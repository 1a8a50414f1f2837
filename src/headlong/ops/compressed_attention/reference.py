"""Attention over a window of tokens, compressed entries and a sink, in plain torch, batch-invariant.

A token's keys are those of the `window` latest tokens, itself last, then its entries in ascending order. They are
multiplied in parts of one shape, and what the parts give is added in their order; parts that others have beyond a
token's own add exact zeros. So a token's bits depend on its own past alone. A key is its own value: its last
dimensions, which were turned by its position, come out turned, and are turned back by the token's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headlong.ops.batched_matmul import matmul
from headlong.ops.compressed_attention.entries import MAX_GATHER, PART, all_ended, gathered
from headlong.ops.compressed_attention.weights import CompressedAttentionWeights
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.ordered_sum import sum_in_order
from headlong.ops.places import Places
from headlong.ops.prepared import PreparedStep
from headlong.ops.ring import latest, write_ring
from headlong.ops.rope.pairs import turn_of, turned
from headlong.ops.rope.reference import Angles


class ReferenceCompressedAttention:
    """The core in plain torch, which other backends are tested against."""

    name = "reference"

    def __init__(self, weights: CompressedAttentionWeights) -> None:
        self.weights = w = weights
        ones = torch.ones(w.head_dim, dtype=w.norm.weight.dtype, device=w.norm.weight.device)
        self._query_norm = RmsNorm(ones, w.query_eps)

    def __call__(
        self,
        queries: Tensor,
        given: Tensor,
        window: Tensor,
        entries: Tensor | None,
        chosen_NK: Tensor | None,
        angles: Angles,
        step: PreparedStep,
    ) -> Tensor:
        w, places = self.weights, step.places
        turn = turn_of(angles, w.rope)
        keys_ND = turned(w.norm(given), turn).to(window.dtype)
        if w.on_pages:
            _write_pages(keys_ND, window, places)
        q_NHD = queries.view(len(queries), w.num_heads, w.head_dim)
        q_NHD = turned(self._query_norm(q_NHD), turn) * w.scale
        if w.ratio and chosen_NK is None:
            chosen_NK = all_ended(places, w.ratio)
        width = w.window + (0 if chosen_NK is None else chosen_NK.shape[1])
        out = torch.empty_like(q_NHD)
        each = max(1, MAX_GATHER // (width * w.head_dim))
        for tokens_M in torch.arange(len(queries), device=queries.device).split(each):
            parts = [self._of_window(keys_ND, window, places, tokens_M)]
            if entries is not None and chosen_NK is not None and chosen_NK.shape[1]:
                number_ME = chosen_NK[tokens_M].long()
                parts.append(gathered(entries, places, tokens_M, number_ME, w.ratio))
            keys = torch.cat([part.to(q_NHD.dtype) for part, _ in parts], 1)
            out[tokens_M] = self._attend(q_NHD[tokens_M], keys, torch.cat([seen for _, seen in parts], 1))
        if not w.on_pages:
            write_ring(keys_ND, window, places)
        return turned(out, turn.back()).flatten(1)

    def write(self, given: Tensor, window: Tensor, angles: Angles, step: PreparedStep) -> None:
        """Writes the tokens' keys, and computes nothing else."""
        w, places = self.weights, step.places
        keys_ND = turned(w.norm(given), turn_of(angles, w.rope)).to(window.dtype)
        (_write_pages if w.on_pages else write_ring)(keys_ND, window, places)

    def _of_window(
        self, keys_ND: Tensor, window: Tensor, places: Places, tokens_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The keys of each token's window, in parts [M, parts, PART, D], and which of them there are."""
        w = self.weights
        if w.on_pages:
            back_J = torch.arange(1 - w.window, 1, device=keys_ND.device)
            position_MJ = places.position_N[tokens_M][:, None] + back_J
            exists_MJ = position_MJ >= 0
            position_MJ = position_MJ.clamp_(min=0)
            page_MJ = places.page_of(places.row_N[tokens_M], position_MJ)
            found = window[page_MJ, position_MJ % places.page_size][..., : w.head_dim]
            found = found.masked_fill(~exists_MJ[..., None], 0.0)
        else:
            found, exists_MJ = latest(keys_ND, window, places, tokens_M, w.window)
        missing = -w.window % PART
        found = F.pad(found, (0, 0, missing, 0)).unflatten(1, (-1, PART))
        return found, F.pad(exists_MJ, (missing, 0)).unflatten(1, (-1, PART))

    def _attend(self, q_MHD: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        scores = matmul(q_MHD[:, None], keys.transpose(-1, -2))  # [M, parts, H, PART]
        scores = scores.masked_fill_(~seen[:, :, None], -torch.inf)
        sinks_H = self.weights.sinks_H.to(scores.dtype)
        top_MH = torch.maximum(scores.amax(dim=(1, 3)), sinks_H)
        weights = scores.sub_(top_MH[:, None, :, None]).exp_()
        total_MH = (sinks_H - top_MH).exp() + sum_in_order(weights.sum(-1), 1)
        return sum_in_order(matmul(weights, keys), 1) / total_MH[..., None]


def _write_pages(keys_ND: Tensor, pages: Tensor, places: Places) -> None:
    missing = pages.shape[-1] - keys_ND.shape[-1]
    page_N = places.page_of(places.row_N, places.position_N)
    pages[page_N, places.position_N % places.page_size] = F.pad(keys_ND, (0, missing)) if missing else keys_ND
