"""How drafts are made, whoever drafts and wherever: a pass, a token for each row, and so on for the rows that go on.

A drafter brings its passes and how a token is chosen of what they give. Knows no model and no device.

L live rows, D rows that draft, R rows of the plan, K drafts of the deepest, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from headlong.speculate.live_rows import Rows
from headlong.types import Draft, Plan

Output = TypeVar("Output")
Output_co = TypeVar("Output_co", covariant=True)


class Choice(NamedTuple):
    """A draft of each live row."""

    tokens_L: Tensor
    q_LV: Tensor | None = None
    """Where a verification will ask how likely the drafter thought each token."""
    logits_LT: Tensor | None = None
    """The logits that tokens were chosen from, where they were made."""
    places_L: Tensor | None = None
    """Where the tokens stand in these logits; None where that is the tokens themselves."""


class Passes(Protocol[Output_co]):
    """What a drafter computes before each choice: hidden states, logits, or both."""

    def first(self) -> Output_co:
        """What is computed for all rows from what the target has committed."""
        ...

    def after(self, drafts: Sequence[Tensor], live: list[int], stay: list[int] | None) -> Output_co:
        """What is computed after the drafts so far, a tensor [L] for each depth. `live` are the rows that go on; `stay`
        are their places among those of the pass before, None where all go on."""
        ...


class Drafted(NamedTuple):
    """One pass of a draft: a token of each row that was live then."""

    live: list[int]
    tokens_L: Tensor
    q_LV: Tensor | None


def make_drafts(
    passes: Passes[Output], choose: Callable[[Output, list[int], Sequence[Tensor]], Choice], rows: Rows
) -> list[Drafted]:
    """Drafts, pass by pass, until no row goes on. `choose` is told the pass, the live rows, and their drafts so far."""
    made: list[Drafted] = []
    before: list[Tensor] = []
    output = passes.first()
    while True:
        live = rows.live
        choice = choose(output, live, before)
        made.append(Drafted(live, choice.tokens_L, choice.q_LV))
        places_L = choice.tokens_L if choice.places_L is None else choice.places_L
        stay = rows.advance(choice.logits_LT, places_L)
        if not rows.live:
            return made
        before = [*before, choice.tokens_L]
        if stay is not None:
            at = torch.tensor(stay, device=choice.tokens_L.device)
            before = [tokens_L[at] for tokens_L in before]
        output = passes.after(before, rows.live, stay)


def spread(
    plan: Plan, numbers: Sequence[int], made: Sequence[Drafted], counts: Sequence[int]
) -> Draft | None:
    """Spreads the drafts of D rows, which are these rows of the plan, over all its rows; None where no draft is kept.
    `counts` are the drafts that each of the D has: fewer than were made, where the last was dropped."""
    width = max(counts)
    if not width:
        return None
    tokens_DK = torch.stack([_over(len(numbers), each.live, each.tokens_L) for each in made[:width]], dim=1)
    q_DKV = None
    some = next((each.q_LV for each in made if each.q_LV is not None), None)
    if some is not None:
        nothing_DV = some.new_zeros(len(numbers), some.shape[1])
        columns = [
            nothing_DV if each.q_LV is None else _over(len(numbers), each.live, each.q_LV)
            for each in made[:width]
        ]
        q_DKV = torch.stack(columns, dim=1)
    num_rows, numbers = len(plan.rows), list(numbers)
    all_counts = [0] * num_rows
    for number, count in zip(numbers, counts, strict=True):
        all_counts[number] = count
    q_RKV = None if q_DKV is None else _over(num_rows, numbers, q_DKV)
    return Draft(_over(num_rows, numbers, tokens_DK), q_RKV, tuple(all_counts))


def _over(num_rows: int, at: list[int], parts: Tensor) -> Tensor:
    """Some rows among all; the others are 0."""
    if at == list(range(num_rows)):
        return parts
    whole = parts.new_zeros(num_rows, *parts.shape[1:])
    whole[torch.tensor(at, device=parts.device)] = parts
    return whole
