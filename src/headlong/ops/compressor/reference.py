"""Entries out of tokens, in plain torch.

    entry = turn(norm(sum_j softmax_j(gate_j + bias_j) · value_j))       number by number, over the tokens of its span

Which tokens an entry is made of is decided by their positions alone: those of this step are at hand, earlier ones lie
in the slot's ring.
"""

import torch
from torch import Tensor

from headlong.ops.compressor.weights import CompressorWeights
from headlong.ops.ordered_sum import halving_sum
from headlong.ops.places import Places
from headlong.ops.prepared import PreparedStep
from headlong.ops.ring import latest, write_ring
from headlong.ops.rope.pairs import fixed_turn, turn_of, turned
from headlong.ops.rope.reference import Angles


class ReferenceCompressor:
    """A compressor that other backends are tested against."""

    name = "reference"

    def __init__(self, weights: CompressorWeights) -> None:
        self.weights = w = weights
        self._to_first = fixed_turn(w.ratio - 1, w.inv_freq_F)
        """The turn from an entry's last token, whose angles a step has, to the first of its window."""

    def __call__(
        self, given: Tensor, ring: Tensor, entries: Tensor, angles: Angles, step: PreparedStep
    ) -> None:
        w, places = self.weights, step.places
        values, gates = given.chunk(2, dim=-1)
        given = torch.cat((values, gates + w.bias_JX[places.position_N % w.ratio]), dim=-1).to(ring.dtype)
        ending_M = ((places.position_N + 1) % w.ratio == 0).nonzero()[:, 0]
        if len(ending_M):
            made_MD = self._made(given, ring, places, ending_M)
            turn = turn_of(angles, w.rope).of(ending_M).earlier(self._to_first)
            self._store(turned(made_MD, turn), entries, places, ending_M)
        write_ring(given, ring, places)

    def _made(self, given: Tensor, ring: Tensor, places: Places, ending_M: Tensor) -> Tensor:
        """The entries that end with these tokens, normed. [M, D]"""
        w = self.weights
        spans, exists_MJ = latest(given, ring, places, ending_M, w.span)
        values, gates = spans.view(len(ending_M), w.span, 2, w.num_series, w.dim).unbind(2)
        if w.num_series > 1:
            series = torch.arange(w.span, device=spans.device) // w.ratio
            values, gates = (_of_series(part, series) for part in (values, gates))
        else:
            values, gates = values[:, :, 0], gates[:, :, 0]
        gates = gates.masked_fill(~exists_MJ[..., None], -torch.inf)
        weights = (gates - gates.amax(1, keepdim=True)).exp()
        return w.norm(halving_sum(weights * values, 1) / halving_sum(weights, 1))

    def _store(self, made_MD: Tensor, entries: Tensor, places: Places, ending_M: Tensor) -> None:
        position_M = places.position_N[ending_M]
        page_M = places.page_of(places.row_N[ending_M], position_M)
        entries[page_M, position_M % places.page_size // self.weights.ratio] = made_MD.to(entries.dtype)


def _of_series(x_MJSD: Tensor, series_J: Tensor) -> Tensor:
    """Takes of each token of a span the series that counts there."""
    index = series_J.view(1, -1, 1, 1).expand(len(x_MJSD), -1, 1, x_MJSD.shape[-1])
    return x_MJSD.gather(2, index)[:, :, 0]
