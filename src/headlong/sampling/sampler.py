"""Chooses tokens. Everything random comes from noise.py, keyed by position: choosing twice gives the same."""

import torch
from torch import Tensor

from headlong.params import SamplingParams
from headlong.sampling import noise
from headlong.sampling.entries import Entries
from headlong.sampling.processors import adjust, shape
from headlong.sampling.table import SamplingTable
from headlong.types import TokenLogprobs


class Sampler:
    """Reads a table, changes nothing."""

    def __init__(self, table: SamplingTable) -> None:
        self.table = table

    def choose(self, logits_LV: Tensor, entries: Entries) -> Tensor:
        """The target's token at each entry: argmax, of the logits or of logits plus that position's noise."""
        adjusted = adjust(logits_LV, entries, self.table)
        tokens_L = adjusted.argmax(-1)
        sampled = entries.where(lambda p: not p.greedy)
        if sampled is not None:
            scores = shape(adjusted, entries, self.table, sampled)
            tokens_L[sampled] = self.draw(scores, entries, sampled, noise.TARGET)
        return tokens_L

    def propose(self, logits_LV: Tensor, entries: Entries) -> tuple[Tensor, Tensor | None]:
        """A draft's token at each entry, and q where a request's verification needs it. Coupled rows share
        the target's noise; `ratio` and `block` rows have their own."""
        tokens_L = self.choose(logits_LV, entries)
        index = entries.where(needs_q)
        if index is None:
            return tokens_L, None
        scores = shape(adjust(logits_LV, entries, self.table), entries, self.table, index)
        tokens_L[index] = self.draw(scores, entries, index, noise.DRAFT)
        q_LV = torch.zeros(logits_LV.shape, dtype=torch.float64, device=logits_LV.device)
        q_LV[index] = torch.softmax(scores, dim=-1)
        return tokens_L, q_LV

    def probabilities(self, logits_LV: Tensor, entries: Entries, index: Tensor) -> Tensor:
        """p, after all processing, at the entries `index`."""
        return torch.softmax(
            shape(adjust(logits_LV, entries, self.table), entries, self.table, index), dim=-1
        )

    def draw(self, scores_MV: Tensor, entries: Entries, index: Tensor, stream: int) -> Tensor:
        """argmax(scores + Gumbel noise): a sample of softmax(scores)."""
        seed, choice, position = self._key(entries, index)
        kept = torch.isfinite(scores_MV)
        if kept.sum() * 8 < kept.numel():
            row, token = torch.where(kept)
            unit = noise.uniform(seed[row], choice[row], position[row], stream, token)
            noisy = scores_MV.clone()
            noisy[row, token] += noise.gumbel(unit)
            return noisy.argmax(-1)
        unit = noise.uniform_vocab(seed, choice, position, stream, scores_MV.shape[1])
        return (scores_MV + noise.gumbel(unit)).argmax(-1)

    def uniform(self, entries: Entries, index: Tensor, stream: int) -> Tensor:
        """One number in (0, 1) for each of the entries `index`."""
        seed, choice, position = self._key(entries, index)
        return noise.uniform(seed, choice, position, stream, torch.zeros_like(seed))

    def logprobs(self, logits_LV: Tensor, tokens_L: Tensor, entries: Entries) -> dict[int, TokenLogprobs]:
        """By entry, for those that asked; from the model's own distribution."""
        index = entries.where(lambda p: p.logprobs is not None)
        if index is None:
            return {}
        logprobs = torch.log_softmax(logits_LV[index], dim=-1)
        chosen = logprobs.gather(1, tokens_L[index, None])[:, 0].tolist()
        wanted = [entries.params[i].logprobs or 0 for i in index.tolist()]
        best = torch.topk(logprobs, min(max(wanted), logits_LV.shape[1]), dim=-1)
        values, ids = best.values.tolist(), best.indices.tolist()
        tokens = tokens_L[index].tolist()
        return {
            i: TokenLogprobs(tokens[m], chosen[m], tuple(zip(ids[m][:n], values[m][:n], strict=True)))
            for m, (i, n) in enumerate(zip(index.tolist(), wanted, strict=True))
        }

    def _key(self, entries: Entries, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slots = entries.slots_L[index]
        return self.table.seed[slots], self.table.choice[slots], entries.positions_L[index]


def needs_q(params: SamplingParams) -> bool:
    """Whether this request's drafts are judged by q as well as p."""
    return params.verify != "coupled" and not params.greedy
