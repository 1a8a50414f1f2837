"""Random schedules for the ops that carry state from step to step: who feeds how many tokens, with how many
drafts, and how many of those stand. Knows rows and counts; what a token is, is the test's business."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.types import Rows


@dataclass(frozen=True)
class Share:
    """One row's part of a step: `certain` tokens from `start`, then drafts, of which the first `accept` are
    the row's own next tokens and the others noise."""

    row: int
    start: int
    certain: int
    drafts: int = 0
    accept: int = 0
    replay: int = 0

    @property
    def kept(self) -> int:
        return self.certain + self.accept


Step = list[Share]


def token_by_token(row: int, length: int) -> list[Step]:
    return [[Share(row, at, 1)] for at in range(length)]


def schedule(lengths: list[int], seed: int, max_chunk: int = 9, max_drafts: int = 8) -> Iterator[Step]:
    """Steps that feed all rows to their end, in random company; within a step, most certain tokens first."""
    rng = random.Random(seed)
    at, replay = [0] * len(lengths), [0] * len(lengths)
    while any(a < n for a, n in zip(at, lengths, strict=True)):
        step = []
        for row in rng.sample(range(len(lengths)), len(lengths)):
            left = lengths[row] - at[row]
            if left and rng.random() < 0.7:
                certain = rng.randint(1, min(left, max_chunk))
                drafts = rng.choice((0, rng.randint(0, max_drafts)))
                accept = rng.randint(0, min(drafts, left - certain))
                step.append(Share(row, at[row], certain, drafts, accept, replay[row]))
        for share in step:
            at[share.row] += share.kept
            replay[share.row] = share.accept
        if step:
            yield sorted(step, key=lambda share: -share.certain)


def gather(step: Step, sequences: list[Tensor], generator: torch.Generator) -> Tensor:
    """The step's tokens, row after row, from each row's own sequence; rejected drafts are noise."""
    parts = []
    for share in step:
        sequence = sequences[share.row]
        parts.append(sequence[share.start : share.start + share.kept])
        shape = (share.drafts - share.accept, *sequence.shape[1:])
        parts.append(torch.rand(shape, generator=generator, dtype=torch.float64).to(sequence.dtype))
    return torch.cat(parts)


def scatter(step: Step, flat: Tensor, results: list[Tensor]) -> None:
    """Puts what a step gave for the tokens that stand into each row's result."""
    first = 0
    for share in step:
        results[share.row][share.start : share.start + share.kept] = flat[first : first + share.kept]
        first += share.certain + share.drafts


def plan_rows(step: Step) -> Rows:
    """The step as the ops' plans take it. Slot 0 belongs to nobody."""
    columns = [(s.row + 1, s.start, s.certain + s.drafts, s.drafts, s.replay) for s in step]
    return Rows(*zip(*columns, strict=True))
