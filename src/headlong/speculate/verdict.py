"""Turns what a step found into its verdict, whoever ran the step.

What comes back from a device is four flat lists: the target's tokens, whether the logits of each are numbers, how many
drafts stand, and the drafts. Knows no tensors but those a verdict passes on, and no sampling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from headlong.types import Plan, TokenLogprobs, Verdict


class Found(NamedTuple):
    """A step's findings on the host, in the order in which they are read back. Rows may have as many tokens as they
    want logits for, or all as many as the one that drafts most."""

    tokens: list[int]
    """For each logits row the token that stands after it."""
    finite: list[int]
    """1 where the logits of that row are numbers."""
    accepted: list[int]
    """How many drafts of each row of the plan were accepted."""
    drafts: list[int]
    """The drafts of each row of the plan, as many for each."""

    @classmethod
    def split(cls, values: list[int], num_tokens: int, num_rows: int, num_drafts: int) -> "Found":
        """Cuts up one list that holds them one after the other; what lies beyond them is something else."""
        accepted = 2 * num_tokens
        drafts = accepted + num_rows
        return cls(
            values[:num_tokens],
            values[num_tokens:accepted],
            values[accepted:drafts],
            values[drafts : drafts + num_rows * num_drafts],
        )


def build_verdict(
    plan: Plan,
    found: Found,
    firsts: Sequence[int],
    tokens_L: Tensor | None = None,
    logprobs: Mapping[int, TokenLogprobs] | None = None,
) -> Verdict:
    """`firsts`: where each row's tokens begin among those found. `logprobs` by place among them."""
    tokens, finite, accepted, drafts = found
    width = len(drafts) // len(plan.rows)
    emitted, rejected, told, poisoned = [], [], [], []
    all_finite = all(finite)
    for number, (row, first, count) in enumerate(zip(plan.rows, firsts, accepted, strict=True)):
        end = first + count + 1 if row.samples else first
        emitted.append(tuple(tokens[first:end]))
        rejected.append(tuple(drafts[number * width + count : number * width + row.num_drafts]))
        told.append(tuple(logprobs[i] for i in range(first, end) if i in logprobs) if logprobs else ())
        if not all_finite and not all(finite[first:end]):
            poisoned.append(number)
    return Verdict(
        tokens_L=tokens_L,
        accepted=tuple(accepted),
        tokens=tuple(emitted),
        rejected=tuple(rejected),
        logprobs=tuple(told),
        poisoned=tuple(poisoned),
    )


def without(plan: Plan, verdict: Verdict, gone: Sequence[int]) -> tuple[Plan, Verdict]:
    """The same step without some of its rows: those that ended meanwhile, or are poisoned."""
    if not gone:
        return plan, verdict
    kept = [n for n in range(len(plan.rows)) if n not in gone]
    tokens_L = verdict.tokens_L
    if tokens_L is not None:
        firsts = plan.first_logits
        tokens_L = tokens_L[[i for n in kept for i in range(firsts[n], firsts[n] + plan.rows[n].num_logits)]]
    rows = tuple(plan.rows[n] for n in kept)
    return Plan(rows, max((row.num_drafts for row in rows), default=0)), replace(
        verdict,
        tokens_L=tokens_L,
        accepted=tuple(verdict.accepted[n] for n in kept),
        tokens=tuple(verdict.tokens[n] for n in kept),
        rejected=tuple(verdict.rejected[n] for n in kept),
        logprobs=tuple(verdict.logprobs[n] for n in kept),
        poisoned=tuple(kept.index(n) for n in verdict.poisoned if n in kept),
    )
