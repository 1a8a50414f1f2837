"""A machine whose costs are known, serving texts whose drafts are accepted at known rates: the best depth can be
computed, and what a chooser of depths achieves can be held against it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from headlong import SamplingParams
from headlong.speculate.depth import Depths, Wish
from headlong.types import Plan, Request, RowPlan, StepTimes, Verdict

MAX_DEPTH = 8
NOTHING = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class Machine:
    """Seconds of a step. The defaults are those of a small model on a CPU core."""

    plain: float = 3.7e-3
    plain_row: float = 0.25e-3
    verify: float = 0.25e-3
    """One more token in the target's pass."""
    draft: float = 0.9e-3
    """One more depth for one row."""
    draft_row: float = 0.08e-3
    """One more row at one depth."""

    def times(self, rows: int, drafts: int, drafting: int, depth: int) -> StepTimes:
        draft = depth * (self.draft + self.draft_row * drafting)
        return StepTimes(draft, self.plain + self.plain_row * rows + self.verify * drafts)

    def speed(self, rates: Sequence[Sequence[float]], depth: int) -> float:
        """Tokens per second of rows that all draft to one depth, expected."""
        times = self.times(len(rates), depth * len(rates), len(rates) if depth else 0, depth)
        return sum(tokens(row, depth) for row in rates) / (times.draft + times.verify)

    def best_fixed(self, rates: Sequence[Sequence[float]]) -> tuple[int, float]:
        speeds = {depth: self.speed(rates, depth) for depth in range(MAX_DEPTH + 1)}
        depth = max(speeds, key=lambda d: speeds[d])
        return depth, speeds[depth]


CPU = Machine()
GPU = Machine(plain=12.5e-3, plain_row=0.05e-3, verify=0.05e-3, draft=0.83e-3, draft_row=0.01e-3)
TINY = Machine(plain=0.5e-3, plain_row=0.02e-3, verify=0.02e-3, draft=0.6e-3, draft_row=0.01e-3)

QUICK = Machine(plain=0.35e-3, plain_row=0.12e-3, verify=0.12e-3, draft=0.15e-3, draft_row=0.03e-3)
"""Bound by arithmetic: a draft in the target's pass costs what a row costs."""


def tokens(rates: Sequence[float], depth: int) -> float:
    total, stands = 1.0, 1.0
    for rate in rates[:depth]:
        stands *= rate
        total += stands
    return total


def flat(rate: float, fall: float = 0.02) -> list[float]:
    """Acceptance that falls a little with depth."""
    return [max(0.0, rate - fall * depth) for depth in range(MAX_DEPTH)]


@dataclass
class Run:
    """What a simulation gave. `spent` and `gained` hold seconds and tokens of every step."""

    spent: list[float] = field(default_factory=list)
    gained: list[float] = field(default_factory=list)
    depths: list[dict[str, int]] = field(default_factory=list)
    ahead: int = 0
    """Steps that were chosen before the one before them was seen."""

    def speed(self, first: int = 0, last: int | None = None) -> float:
        return sum(self.gained[first:last]) / sum(self.spent[first:last])

    def mean_depth(self, first: int, last: int | None = None) -> float:
        chosen = [depth for step in self.depths[first:last] for depth in step.values()]
        return sum(chosen) / len(chosen)


Noise = Callable[[random.Random], float]
Rates = Callable[[int], dict[str, Sequence[float]]]


def jitter(share: float = 0.05, slow: float = 0.0) -> Noise:
    """A factor on the measured time: a few per cent either way, and ten times as much in a share `slow` of steps."""

    def draw(rng: random.Random) -> float:
        return rng.lognormvariate(0.0, share) * (10.0 if rng.random() < slow else 1.0)

    return draw


def simulate(
    depths: Depths,
    machine: Machine,
    rates: Rates,
    steps: int,
    *,
    seed: int = 0,
    noise: Noise | None = None,
    fixed: dict[str, int] | None = None,
    sampled: bool = False,
    apart: bool = False,
    into: Run | None = None,
    ahead: bool = False,
) -> Run:
    """`rates(step)` says which rows run and how their drafts fare. Time is counted without the noise, tokens as they
    are expected of the depths chosen, so that the outcome depends on the choices alone. `ahead`: a step is chosen
    before the one before it was seen, where that can be; but none with drafts after one without."""
    rng, run = random.Random(seed), into or Run()
    fixed, noise = fixed or {}, noise or jitter()
    requests: dict[str, Request] = {}
    following = None
    for step in range(steps):
        rows = rates(step)
        wishes = {row: Wish(fixed.get(row, MAX_DEPTH), row not in fixed, sampled, apart) for row in rows}
        chosen = depths.choose(wishes, 0) if following is None else following
        run.ahead += following is not None
        assert chosen.keys() == wishes.keys()
        accepted = tuple(_accepted(rows[row], chosen[row], rng) for row in rows)
        for row in rows:
            requests.setdefault(row, Request(row, (1,), SamplingParams(), 0, draft_tokens=8, adaptive=True))
        plan = Plan(
            tuple(plan_row(requests[row], chosen[row]) for row in rows), max(chosen.values(), default=0)
        )
        drafting = sum(depth > 0 for depth in chosen.values())
        times = machine.times(len(rows), sum(chosen.values()), drafting, plan.num_drafts)
        factor = noise(rng)
        following = depths.again(wishes) if ahead and rates(step + 1).keys() == rows.keys() else None
        if following is not None and any(following.values()) and not any(chosen.values()):
            following = None
        depths.observe(plan, verdict(accepted), StepTimes(times.draft * factor, times.verify * factor))
        run.spent.append(times.draft + times.verify)
        run.gained.append(sum(tokens(rows[row], chosen[row]) for row in rows))
        run.depths.append(dict(chosen))
    return run


def plan_row(request: Request, depth: int, known: tuple[int, ...] = ()) -> RowPlan:
    return RowPlan(
        request=request,
        slot=1,
        start=10,
        query_len=1 + depth,
        num_drafts=depth,
        num_replay=0,
        pages=(1,),
        samples=True,
        num_generated=5,
        known_tokens=known,
    )


def verdict(accepted: tuple[int, ...]) -> Verdict:
    empty = tuple(() for _ in accepted)
    return Verdict(NOTHING, accepted, empty, empty, empty)


def _accepted(rates: Sequence[float], depth: int, rng: random.Random) -> int:
    count = 0
    while count < depth and rng.random() < rates[count]:
        count += 1
    return count
