"""Drafts that no noise went into, as a lookup makes them: q is one at the token, and the target's law stays."""

import pytest
import torch
from toy_pair import ToyPair, p_value

from headlong.params import SamplingParams


class CertainDrafts(ToyPair):
    """From draft `certain_from` on the drafter is sure of its best token."""

    certain_from = 0

    def step(self, sampler, requests, histories, who, depth, rule):
        place = 0

        def look_up(table, longer):
            nonlocal place
            found = ToyPair.look_up(table, longer)
            if table is self.draft:
                if place >= self.certain_from:
                    best = found == found.amax(-1, keepdim=True)
                    found = torch.zeros_like(found).masked_fill(~best, -torch.inf)
                place += 1
            return found

        self.look_up = look_up  # type: ignore[method-assign]
        try:
            return super().step(sampler, requests, histories, who, depth, rule)
        finally:
            del self.look_up


@pytest.mark.parametrize("certain_from", [0, 1])
@pytest.mark.parametrize("rule", ["ratio", "block", "coupled"])
def test_the_law_stays(rule, certain_from):
    """Alone, and after a draft of another law."""
    pair, length = CertainDrafts(vocab=3, distance=1.0, seed=4), 3
    pair.certain_from = certain_from
    params = SamplingParams(temperature=1.0, verify=rule)
    counts, accepted = pair.generate(params, 3, length, rows=6000)
    assert accepted > 0.2 and p_value(counts, pair.law(length)) > 1e-3
