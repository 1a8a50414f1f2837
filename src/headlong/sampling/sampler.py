"""Chooses tokens. Everything random comes from noise.py, keyed by position: choosing twice gives the same."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from headlong.ops.argmax.reference import argmax
from headlong.ops.backend import Draw, Penalise, Sample
from headlong.params import SamplingParams
from headlong.sampling import noise
from headlong.sampling.changes import adjust
from headlong.sampling.entries import Entries
from headlong.sampling.noise import Key
from headlong.sampling.processors import ANY_FILTERS, FilterSet, SamplingSignature, shape
from headlong.sampling.table import SamplingTable
from headlong.sampling.trials import draws_alike, penalises_alike, samples_alike
from headlong.sampling.wanted import EvenWanted, RaggedWanted, Wanted
from headlong.types import TokenLogprobs


class Sampler:
    """Reads a table, changes nothing."""

    def __init__(
        self,
        table: SamplingTable,
        argmax: Callable[[Tensor], Tensor] = argmax,
        draw: Draw | None = None,
        sample: Sample | None = None,
        penalise: Penalise | None = None,
    ) -> None:
        """Ops: `argmax` finds the best token of each row of logits, `draw` adds the noise of each row's key first,
        `sample` filters before that, and `penalise` changes logits by what a device has counted; these three are tried
        once on a GPU."""
        self.table = table
        self.argmax = argmax
        device = table.seed.device
        on_cpu = device.type == "cpu"
        self._draw = draw if draw is None or on_cpu or draws_alike(draw, device) else None
        self._sample = sample if sample is None or on_cpu or samples_alike(sample, device) else None
        tried = penalise is None or on_cpu or penalises_alike(penalise, device)
        self._penalise = penalise if tried else None
        self._least_filters = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64, device=device)
        """The filters that take least time, for rows whose drawn token nobody asks for."""

    def is_plain(self, slots: Iterable[int]) -> bool:
        """Whether rows in these slots all want the best token of the logits as they are; `argmax` gives it."""
        requests, constraints = self.table.requests, self.table.constraints
        for slot in slots:
            request = requests[slot]
            if request is None or not request.params.plain or slot in constraints:
                return False
        return True

    def signature(self, slots: Iterable[int]) -> SamplingSignature | None:
        """What rows in these slots ask for, if their tokens can be chosen without the host, but for what grammars
        allow: they all want the best ones, or are all sampled by the same filters, or some do and others are, by any,
        where there is an op for all filters; and where logits are changed there is an op for that. `choose_even` then
        gives their tokens."""
        filters: set[FilterSet] = set()
        greedy = penalised = biased = early = constrained = False
        for slot in slots:
            request = self.table.requests[slot]
            if request is None or not request.params.free:
                return None
            params = request.params
            early, constrained = early or params.min_tokens > 0, constrained or slot in self.table.constraints
            penalised, biased = penalised or params.penalised, biased or params.biased
            greedy = greedy or params.greedy
            if not params.greedy:
                filters.add(ANY_FILTERS if self._sample is not None else FilterSet.of(params))
        if len(filters) > 1 or (filters and greedy and self._sample is None):
            return None
        if (penalised or biased) and self._penalise is None:
            return None
        found = filters.pop() if filters else None
        return SamplingSignature(found, greedy, penalised, biased, early, constrained)

    def choose(self, logits_LV: Tensor, entries: Entries) -> Tensor:
        """The target's token at each entry."""
        return self._choose(logits_LV, RaggedWanted(self.table, entries))

    def choose_even(
        self,
        logits_NV: Tensor,
        slots_R: Tensor,
        positions_N: Tensor | None,
        drafts_RK: Tensor,
        signature: SamplingSignature,
        bits_NB: Tensor | None = None,
    ) -> Tensor:
        """`choose` for such rows, with as many logits for each; asks the host for nothing. The last of a row's stand
        after all its drafts, each of the others after one less; where nothing is changed, nobody asks for drafts, and
        for positions only where tokens are sampled or rows have a minimum length. What penalised rows have seen is up
        to date in the tally. `bits_NB` say which tokens are allowed, if not all are."""
        least, each = self._least_filters, len(logits_NV) // len(slots_R)
        wanted = EvenWanted(
            self.table, self._penalise, slots_R, positions_N, drafts_RK, signature, bits_NB, least, each
        )
        return self._choose(logits_NV, wanted)

    def _choose(self, logits_LV: Tensor, wanted: Wanted) -> Tensor:
        """argmax, of the logits as they are wanted, or of what filters leave of them plus each position's noise."""
        adjusted_LV = adjust(logits_LV, wanted.changes, self.table)
        if wanted.sampled == "none":
            return self.argmax(adjusted_LV)
        if self._sample is None or adjusted_LV.dtype != torch.float32:
            sampled_M = self._drawn(wanted.shaped(adjusted_LV), wanted.keys_M4)
        else:
            sampled_M = self._sample(wanted.picked(adjusted_LV), wanted.filters_M4, wanted.keys_M4)
        if wanted.sampled == "all":
            return sampled_M
        return wanted.mixed(self.argmax(adjusted_LV), sampled_M)

    def propose(self, logits_LV: Tensor, entries: Entries) -> tuple[Tensor, Tensor | None]:
        """A draft's token at each entry, and q where a request's verification needs it. Coupled rows share
        the target's noise; `ratio` and `block` rows have their own."""
        tokens_L = self.choose(logits_LV, entries)
        own = entries.which(needs_q)
        if not own:
            return tokens_L, None
        index = torch.tensor(own, device=tokens_L.device)
        scores = shape(adjust(logits_LV, entries, self.table), entries, self.table, own)
        tokens_L[index] = self.draw(scores, entries, index, noise.DRAFT)
        q_LV = torch.zeros(logits_LV.shape, dtype=torch.float64, device=logits_LV.device)
        q_LV[index] = torch.softmax(scores, dim=-1)
        return tokens_L, q_LV

    def probabilities(self, logits_LV: Tensor, entries: Entries, index: list[int]) -> Tensor:
        """p, after all processing, at the entries `index`."""
        adjusted = adjust(logits_LV, entries, self.table)
        return torch.softmax(shape(adjusted, entries, self.table, index), dim=-1)

    def draw(self, scores_MV: Tensor, entries: Entries, index: Tensor, stream: int) -> Tensor:
        """argmax(scores + Gumbel noise): a sample of softmax(scores)."""
        return self._drawn(scores_MV, torch.stack(self._key(entries, index, stream), dim=1))

    def _drawn(self, scores_MV: Tensor, keys_M4: Tensor) -> Tensor:
        if self._draw is not None:
            return self._draw(scores_MV, keys_M4)
        seed, choice, position, streams = keys_M4.unbind(1)
        key = seed, choice, position, streams
        kept = torch.isfinite(scores_MV)
        # Where little is left, noise for the rest is wasted; finding out would stall a GPU.
        if scores_MV.device.type == "cpu" and kept.sum() * 8 < kept.numel():
            row, token = torch.where(kept)
            seed, choice, position, streams = (part[row] for part in key)
            unit = noise.uniform(seed, choice, position, streams, token)
            noisy = scores_MV.clone()
            noisy[row, token] += noise.gumbel(unit)
            return noisy.argmax(-1)
        return noise.draw(scores_MV, key)

    def uniform(self, entries: Entries, index: Tensor, stream: int) -> Tensor:
        """One number in (0, 1) for each of the entries `index`."""
        key = self._key(entries, index, stream)
        return noise.uniform(*key, torch.zeros_like(index))

    def logprobs(self, logits_LV: Tensor, tokens_L: Tensor, entries: Entries) -> dict[int, TokenLogprobs]:
        """Log-probabilities by entry, of those that asked, from the model's own distribution."""
        asked = entries.which(lambda p: p.logprobs is not None)
        if not asked:
            return {}
        index = torch.tensor(asked, device=logits_LV.device)
        logprobs = torch.log_softmax(logits_LV[index], dim=-1)
        chosen = logprobs.gather(1, tokens_L[index, None])[:, 0].tolist()
        wanted = [entries.params[i].logprobs or 0 for i in asked]
        best = best_of(logprobs, max(wanted))
        tokens = tokens_L[index].tolist()
        return {
            i: TokenLogprobs(tokens[m], chosen[m], tuple(best[m][:n]))
            for m, (i, n) in enumerate(zip(asked, wanted, strict=True))
        }

    def _key(self, entries: Entries, index: Tensor, stream: int) -> Key:
        slots, positions = entries.slots_L[index], entries.positions_L[index]
        streams = torch.full_like(positions, stream)
        if stream in (noise.DRAFT, noise.ACCEPT):
            # What a later draft drew helps the block rule to decide on an earlier one. A position that is
            # drafted again after a rejection stands at another offset and must not see those numbers again.
            streams += len(noise.STREAMS) * entries.offsets_L[index]
        return self.table.seed[slots], self.table.choice[slots], positions, streams


def best_of(logprobs_MV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` best (token, value) pairs of each row, or more; of equal ones the lowest token first, which
    `topk` does not promise."""
    least = torch.topk(logprobs_MV, min(max(count, 1), logprobs_MV.shape[1]), dim=-1).values[:, -1:]
    row, token = torch.where(logprobs_MV >= least)
    best: list[list[tuple[int, float]]] = [[] for _ in logprobs_MV]
    for m, pair in zip(
        row.tolist(), zip(token.tolist(), logprobs_MV[row, token].tolist(), strict=True), strict=True
    ):
        best[m].append(pair)
    return [sorted(pairs, key=lambda pair: -pair[1]) for pairs in best]


def needs_q(params: SamplingParams) -> bool:
    """Whether this request's drafts are judged by q as well as p."""
    return params.verify != "coupled" and not params.greedy
