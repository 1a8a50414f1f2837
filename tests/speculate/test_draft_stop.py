"""Stopping by confidence on simulated machines: drafts whose chances differ from one to the next, and drafters that say
so truthfully, in other words, or not at all."""

import random
from collections.abc import Callable, Sequence
from statistics import mean, median

import pytest
import torch
from simulated_machine import CPU, GPU, MAX_DEPTH, TINY, Machine, jitter, plan_row, verdict
from test_depth import profile_of

from headlong import SamplingParams
from headlong.speculate.confidence import Calibration
from headlong.speculate.depth import AdaptiveDepths, Wish
from headlong.speculate.live_rows import LiveRows
from headlong.types import Plan, Request, StepTimes

MACHINES = {"cpu": CPU, "gpu": GPU, "tiny": TINY}
CHANCES = {"mixed": (0.97, 0.97, 0.5), "good": (0.95, 0.9, 0.97), "poor": (0.05, 0.3, 0.1)}
SAYS: dict[str, Callable[[float, random.Random], float]] = {
    "truthful": lambda chance, rng: chance,  # noqa: ARG005
    "modest": lambda chance, rng: chance / 2,  # noqa: ARG005
    "silent": lambda chance, rng: 0.5,  # noqa: ARG005
    "random": lambda chance, rng: rng.random(),  # noqa: ARG005
}


def expected_tokens(chances: Sequence[float]) -> float:
    total, stands = 1.0, 1.0
    for chance in chances:
        stands *= chance
        total += stands
    return total


def fixed_speed(machine: Machine, rows: int, chances: Sequence[float], depth: int) -> float:
    """Drafts are independent of one another, so that the mean chance tells what a fixed depth gives."""
    times = machine.times(rows, depth * rows, rows if depth else 0, depth)
    return rows * expected_tokens([mean(chances)] * depth) / (times.draft + times.verify)


def drafted(depths: AdaptiveDepths, wanted: dict[str, int], said: dict[str, list[float]]) -> dict[str, int]:
    """As a drafter does it: one pass after the other, asking after each who goes on."""
    counts, live = dict.fromkeys(wanted, 0), [row for row in wanted if wanted[row]]
    if depths.draft_stop is None:
        return dict(wanted)
    for place in range(MAX_DEPTH):
        if not live:
            break
        kept, going = depths.draft_stop.judge(live, [said[row][place] for row in live])
        for row, stays in zip(live, kept, strict=True):
            counts[row] += stays
        assert all(stays or not goes for stays, goes in zip(kept, going, strict=True))
        live = [row for row, goes in zip(live, going, strict=True) if goes and counts[row] < wanted[row]]
    return counts


def speed(machine: Machine, rows: int, chances: Sequence[float], says, seed: int, steps: int = 600) -> float:
    rng, depths = random.Random(seed), AdaptiveDepths(MAX_DEPTH, profile_of(machine))
    requests = {
        f"row{n}": Request(f"row{n}", (1,), SamplingParams(), 0, draft_tokens=8, adaptive=True)
        for n in range(rows)
    }
    spent = gained = 0.0
    for _ in range(steps):
        own = {row: [rng.choice(chances) for _ in range(MAX_DEPTH)] for row in requests}
        wanted = dict(depths.choose(dict.fromkeys(requests, Wish(MAX_DEPTH, True)), 0))
        counts = drafted(depths, wanted, {row: [says(c, rng) for c in line] for row, line in own.items()})
        accepted = tuple(
            next((n for n in range(counts[row]) if rng.random() >= own[row][n]), counts[row])
            for row in requests
        )
        plan = Plan(
            tuple(plan_row(request, counts[row]) for row, request in requests.items()), max(counts.values())
        )
        made = {} if depths.draft_stop is None else depths.draft_stop.made
        passes = [max(counts[row], len(made[row].confidences) if row in made else 0) for row in requests]
        passes = [count for count in passes if count]
        times = machine.times(rows, sum(counts.values()), len(passes), max(passes, default=0))
        factor = jitter()(rng)
        depths.observe(plan, verdict(accepted), StepTimes(times.draft * factor, times.verify * factor))
        spent += times.draft + times.verify
        gained += sum(expected_tokens(own[row][: counts[row]]) for row in requests)
    return gained / spent


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("kind", CHANCES)
@pytest.mark.parametrize("says", SAYS)
def test_never_slower_and_near_the_best_fixed_depth(name, rows, kind, says):
    machine, chances = MACHINES[name], CHANCES[kind]
    found = median(speed(machine, rows, chances, SAYS[says], seed, 250) for seed in range(3))
    assert found > 0.97 * fixed_speed(machine, rows, chances, 0)
    best = max(fixed_speed(machine, rows, chances, depth) for depth in range(MAX_DEPTH + 1))
    assert found > 0.95 * best


@pytest.mark.parametrize("says", ["truthful", "modest"])
@pytest.mark.parametrize(("name", "rows", "times"), [("cpu", 1, 1.03), ("gpu", 1, 1.03), ("cpu", 2, 1.0)])
def test_confidence_beats_every_fixed_depth(name, rows, times, says):
    """Whatever scale it comes in. Of many rows one always goes on, and the others gain little by stopping."""
    machine, chances = MACHINES[name], CHANCES["mixed"]
    best = max(fixed_speed(machine, rows, chances, depth) for depth in range(MAX_DEPTH + 1))
    found = median(speed(machine, rows, chances, SAYS[says], seed) for seed in range(3))
    assert found > times * best


def test_confidence_is_calibrated_by_position_and_row():
    rng, calibration = random.Random(0), Calibration(MAX_DEPTH)
    odds = {"sure": 8.0, "unsure": 0.3}
    rates = {row: [own / 2**place / (1 + own / 2**place) for place in range(3)] for row, own in odds.items()}
    for _ in range(400):
        calibration.tick()
        for row, own in rates.items():
            accepted = next((n for n in range(3) if rng.random() >= own[n]), 3)
            calibration.observe(row, [0.6] * 3, accepted)
    for row, own in rates.items():
        found = [calibration.chance(row, place, 0.6) for place in range(3)]
        assert found == pytest.approx(own, abs=0.12)
    new = calibration.chance("new", 0, 0.6)
    assert calibration.chance("unsure", 0, 0.6) < new < calibration.chance("sure", 0, 0.6)
    calibration.keep(["sure"])
    assert calibration.chance("unsure", 0, 0.6) == new


def test_rows_that_keep_their_depth_are_never_stopped():
    depths = AdaptiveDepths(MAX_DEPTH, profile_of(TINY))
    for _ in range(50):
        wanted = dict(depths.choose({"own": Wish(4, False), "free": Wish(8, True)}, 0))
        counts = drafted(depths, wanted, {"own": [0.01] * 8, "free": [0.01] * 8})
        assert counts["own"] == 4
        requests = [Request(row, (1,), SamplingParams(), 0, draft_tokens=8) for row in wanted]
        plan = Plan(tuple(plan_row(request, counts[request.id]) for request in requests), 4)
        depths.observe(plan, verdict((0, 0)), StepTimes(1e-3, 1e-3))


def test_a_drafter_that_says_no_number_harms_nobody():
    """Drafts are judged by the target; a damaged head costs time and nothing else."""
    depths = AdaptiveDepths(MAX_DEPTH, profile_of(GPU))
    row = Request("a", (1,), SamplingParams(), 0, draft_tokens=8, adaptive=True)
    drafted_steps = 0
    for _ in range(60):
        wanted = depths.choose({"a": Wish(8, True)}, 0)["a"]
        counts = drafted(depths, {"a": wanted}, {"a": [float("nan")] * 8})
        drafted_steps += counts["a"] > 0
        depths.observe(Plan((plan_row(row, counts["a"]),), counts["a"]), verdict((0,)), StepTimes(1e-3, 1e-2))
    assert 0 < drafted_steps < 40


class Script:
    """A stop rule that says what it is told to."""

    def __init__(self, *answers: tuple[list[bool], list[bool]]) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    def judge(self, row_ids: Sequence[str], confidences: Sequence[float]) -> tuple[list[bool], list[bool]]:
        assert len(confidences) == len(row_ids)
        self.asked.append(list(row_ids))
        return self.answers.pop(0)


def test_live_rows_count_what_is_kept():
    request = lambda row, free: Request(row, (1,), SamplingParams(), 0, draft_tokens=8, adaptive=free)  # noqa: E731
    rows = [
        plan_row(request("a", True), 3),
        plan_row(request("b", False), 2),
        plan_row(request("c", True), 3),
    ]
    yes, no = True, False
    stop = Script(([yes, yes, no], [yes, yes, no]), ([yes, yes], [yes, yes]), ([no], [no]))
    going = LiveRows(Plan(tuple(rows), 3, stop), rows)
    logits, tokens = torch.zeros(3, 5), torch.tensor([1, 2, 3])
    assert going.advance(logits, tokens) == [0, 1] and going.live == [0, 1]
    assert going.advance(logits[:2], tokens[:2]) == [0] and going.live == [0]
    assert going.advance(logits[:1], tokens[:1]) == [] and going.counts == [2, 2, 0]
    assert stop.asked == [["a", "b", "c"], ["a", "b"], ["a"]]
    alone = LiveRows(Plan((rows[1],), 2, stop), [rows[1]])
    assert [alone.advance(logits[:1], tokens[:1]) for _ in range(2)] == [None, []] and alone.counts == [2]
