"""How a draft's tokens are chosen where the host sees every pass: as the target's would be, or the best where nobody
asks for more."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headlong.sampling.entries import Entries, Entry
from headlong.sampling.sampler import Sampler
from headlong.speculate.draft_loop import Choice
from headlong.speculate.vocabulary import DraftVocabulary
from headlong.types import RowPlan


class HostChoice:
    """For some rows of a step, by their logits of each pass."""

    def __init__(
        self, sampler: Sampler, rows: Sequence[RowPlan], vocabulary: DraftVocabulary | None = None
    ) -> None:
        """Logits are of the tokens of a `vocabulary`; without one, of all."""
        self._sampler, self._rows, self._vocabulary = sampler, rows, vocabulary
        self._plain = sampler.is_plain(row.slot for row in rows)

    def __call__(self, logits_LT: Tensor, live: list[int], before: Sequence[Tensor]) -> Choice:
        vocabulary = self._vocabulary
        if self._plain:
            places_L = self._sampler.argmax(logits_LT)
            tokens_L = places_L if vocabulary is None else vocabulary.tokens(places_L)
            return Choice(tokens_L, logits_LT=logits_LT, places_L=places_L)
        logits_LV = logits_LT if vocabulary is None else vocabulary.whole(logits_LT)
        depth, rows = len(before), [self._rows[number] for number in live]
        entries = [Entry(row.slot, row.start + 1 + depth, depth) for row in rows]
        before_LK = torch.stack(list(before), dim=1) if before else None
        given = Entries(entries, self._sampler.table, before_LK, patient=False)
        tokens_L, q_LV = self._sampler.propose(logits_LV, given)
        return Choice(tokens_L, q_LV, logits_LV)
