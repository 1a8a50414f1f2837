"""The choice of depth on simulated machines, where the best answer can be computed."""

import itertools
import random
from statistics import median

import pytest
from simulated_machine import (
    CPU,
    GPU,
    MAX_DEPTH,
    QUICK,
    TINY,
    Machine,
    flat,
    jitter,
    plan_row,
    simulate,
    tokens,
    verdict,
)

from headlong import SamplingParams
from headlong.speculate import depth as depth_module
from headlong.speculate.acceptance import Acceptance, Curve
from headlong.speculate.costs import FEW, Costs, Table
from headlong.speculate.depth import AdaptiveDepths, FixedDepths, Wish
from headlong.speculate.profile import Cost, Profile
from headlong.speculate.tour import SHALLOW, STOPS
from headlong.speculate.utility import Candidate, best
from headlong.types import Plan, Request, StepTimes

MACHINES = {"cpu": CPU, "gpu": GPU, "tiny": TINY}


def profile_of(machine: Machine) -> Profile:
    costs = []
    for rows, depth in itertools.product((1, 2, 4, 8, 16), range(MAX_DEPTH + 1)):
        times = machine.times(rows, rows * depth, rows if depth else 0, depth)
        costs.append(Cost(rows, depth, times.verify, times.draft))
    return Profile({}, tuple(costs))


def costs_of(machine: Machine) -> Costs:
    return AdaptiveDepths(MAX_DEPTH, profile_of(machine)).costs


def alike(count: int, rate: float):
    rows = {f"row{number}": flat(rate) for number in range(count)}
    return lambda step: rows  # noqa: ARG005


def speeds(machine, rates, steps, *, known=True, first=0, last=None, seeds=3, noise=None):
    """What the adaptive choice reaches, run by run."""
    found = []
    for seed in range(seeds):
        depths = AdaptiveDepths(MAX_DEPTH, profile_of(machine) if known else None)
        run = simulate(depths, machine, rates, steps, seed=seed, noise=noise)
        found.append(run.speed(first, last))
    return found


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_never_slower_and_near_the_best(name, rows, rate):
    """From the first step on where costs are known."""
    machine, rates = MACHINES[name], alike(rows, rate)
    texts = list(rates(0).values())
    found = median(speeds(machine, rates, 300))
    assert found > 0.97 * machine.speed(texts, 0)
    assert found > 0.95 * machine.best_fixed(texts)[1]


@pytest.mark.parametrize("name", ["gpu", "tiny"])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_steps_that_follow_before_the_last_was_seen(name, rows, rate):
    """They are chosen as well, and most steps are such."""
    machine, rates = MACHINES[name], alike(rows, rate)
    texts, found = list(rates(0).values()), []
    for seed in range(3):
        depths = AdaptiveDepths(MAX_DEPTH, profile_of(machine), whole=True)
        run = simulate(depths, machine, rates, 300, seed=seed, ahead=True)
        found.append(run.speed())
        assert run.ahead > 0.65 * 300
    assert median(found) > 0.97 * machine.speed(texts, 0)
    assert median(found) > 0.95 * machine.best_fixed(texts)[1]


@pytest.mark.parametrize("known", [True, False])
def test_nothing_follows_a_step_that_is_to_teach_something_before_it_was_seen(known):
    depths = AdaptiveDepths(MAX_DEPTH, profile_of(GPU) if known else None, whole=True)
    wishes = {"row0": Wish(MAX_DEPTH, True)}
    taught = 0
    for step in range(200):
        depths.choose(wishes, 0)
        aside = depths._touring or depths._probing.is_aside
        assert not aside or depths.again(wishes) is None
        taught += aside
        drafted = plan_row(
            Request("row0", (1,), SamplingParams(), 0, draft_tokens=8, adaptive=True), step % 2
        )
        depths.observe(Plan((drafted,), step % 2), verdict((0,)), StepTimes(1e-3 * (step % 2), 1e-2))
    assert taught
    assert depths.again({**wishes, "row1": Wish(MAX_DEPTH, True)}) is None, "others run"


@pytest.mark.parametrize(
    ("name", "rows", "rate"),
    [("cpu", 1, 0.1), ("cpu", 1, 0.9), ("cpu", 16, 0.5), ("gpu", 1, 0.8), ("gpu", 16, 0.9), ("tiny", 4, 0.9)],
)
def test_an_unknown_machine_is_known_after_fifty_steps(name, rows, rate):
    machine, rates = MACHINES[name], alike(rows, rate)
    texts = list(rates(0).values())
    found = speeds(machine, rates, 250, known=False, first=50)
    assert median(found) > 0.965 * machine.best_fixed(texts)[1]
    assert min(found) > 0.94 * machine.best_fixed(texts)[1]


@pytest.mark.parametrize("noise", [jitter(), jitter(0.1, slow=0.05)], ids=["quiet", "slow steps"])
@pytest.mark.parametrize(("before", "after"), [(0.1, 0.9), (0.9, 0.1), (0.5, 0.95)])
@pytest.mark.parametrize(("name", "rows"), [("cpu", 1), ("cpu", 4), ("gpu", 1), ("gpu", 16)])
def test_a_text_that_changes_is_followed_within_fifty_steps(name, rows, before, after, noise):
    machine, old, new = MACHINES[name], alike(rows, before)(0), alike(rows, after)(0)
    found = speeds(
        machine, lambda step: old if step < 150 else new, 300, first=200, seeds=9, noise=noise, known=False
    )
    best_speed = machine.best_fixed(list(new.values()))[1]
    assert median(found) > 0.95 * best_speed
    assert min(found) > 0.7 * best_speed


@pytest.mark.parametrize("rows", [1, 4])
def test_what_steps_by_parts_cost_is_not_held_against_steps_that_are_one_launch(rows):
    """Nor the other way round: where each draft waits for the host, three are dearer than three steps. Rows come and go
    of which some stand apart: these do not draft, and the others do."""
    parts, rates = Machine(plain=4.7e-3, verify=0.3e-3, draft=3e-3), alike(rows, 0.9)
    texts, found, found_apart = list(rates(0).values()), [], []
    for seed in range(3):
        depths, run, bounds = AdaptiveDepths(MAX_DEPTH, whole=True), None, []
        for turn in range(8):
            first = len(run.spent) if run else 0
            machine = parts if turn % 2 else GPU
            run = simulate(depths, machine, rates, 60, seed=seed + turn, apart=machine is parts, into=run)
            bounds.append((first, len(run.spent)))
        found += [run.speed(*bound) for bound in bounds[2::2]]
        found_apart += [run.speed(*bound) for bound in bounds[3::2]]
    assert median(found) > 0.97 * GPU.best_fixed(texts)[1]
    assert median(found_apart) > 0.95 * parts.best_fixed(texts)[1]


@pytest.mark.parametrize("rows", [1, 4])
def test_what_sampling_costs_is_not_held_against_rows_that_do_not(rows):
    """Sampled rows, whose every draft costs thrice as much, and then again greedy ones: no step is lost on finding out
    what was known before."""
    dear = Machine(plain=4.5e-3, verify=0.8e-3, draft=2.7e-3)
    rates = alike(rows, 0.9)
    found = []
    for seed in range(3):
        depths, run = AdaptiveDepths(MAX_DEPTH), None
        for machine, steps, sampled in ((CPU, 100, False), (dear, 300, True), (CPU, 50, False)):
            run = simulate(depths, machine, rates, steps, seed=seed, sampled=sampled, into=run)
        found.append(run.speed(400))
    assert median(found) > 0.97 * CPU.best_fixed(list(rates(0).values()))[1]


def test_rows_that_stop_drafting_are_looked_at_soon_after():
    """Good drafts, a dip, good drafts again: that nobody was idle before the dip is no reason to look away after it."""
    machine, rows = (
        Machine(plain=2.8e-3, plain_row=0.2e-3, verify=0.2e-3, draft=0.3e-3, draft_row=0.06e-3),
        16,
    )
    good, bad = alike(rows, 0.97)(0), alike(rows, 0.2)(0)
    waits = []
    for seed in range(9):
        depths = AdaptiveDepths(MAX_DEPTH, profile_of(machine))
        run = simulate(depths, machine, lambda step: bad if 100 <= step < 112 else good, 180, seed=seed)
        assert run.mean_depth(60, 100) > 1.0
        waits.append(sum(not any(step.values()) for step in run.depths[112:]))
    assert median(waits) <= 16


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("rows", [1, 16])
def test_probes_lose_little(name, rows):
    """Drafts that never stand: all that is drafted is lost."""
    machine = MACHINES[name]
    nothing = {f"row{number}": [0.0] * MAX_DEPTH for number in range(rows)}
    run = simulate(AdaptiveDepths(MAX_DEPTH, profile_of(machine)), machine, lambda _: nothing, 1500)
    plain = machine.speed(list(nothing.values()), 0)
    assert run.speed(100) > 0.98 * plain
    for first in range(100, 1500, 200):
        assert run.speed(first, first + 200) > 0.965 * plain


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_probes_that_were_long_in_vain_become_rare(name, rows):
    """But are not given up: of a text that changes after all, the engine knows a while later."""
    machine, good = MACHINES[name], alike(rows, 0.95)(0)
    nothing, waits = {row: [0.0] * MAX_DEPTH for row in good}, []
    plain = machine.speed(list(nothing.values()), 0)
    for seed in range(5):
        depths = AdaptiveDepths(MAX_DEPTH, profile_of(machine))
        run = simulate(depths, machine, lambda step: nothing if step < 2000 else good, 2400, seed=seed)
        assert run.speed(800, 2000) > 0.994 * plain
        drafting = [step for step, chosen in enumerate(run.depths[2000:]) if max(chosen.values()) > 1]
        waits.append(drafting[0] if drafting else 400)
    if machine.best_fixed(list(good.values()))[1] > 1.05 * machine.speed(list(good.values()), 0):
        assert median(waits) < 150 and max(waits) < 250


def test_rows_of_one_batch_get_depths_of_their_own():
    """Where every token in the target's pass is dear and drafting is cheap."""
    machine = Machine(plain=4e-3, verify=0.8e-3, draft=0.1e-3, draft_row=0.02e-3)
    rates = {"good": flat(0.95), "bad": [0.05] * MAX_DEPTH, "fair": flat(0.85)}
    run = simulate(AdaptiveDepths(MAX_DEPTH, profile_of(machine)), machine, lambda _: rates, 400)
    mean = {row: sum(step[row] for step in run.depths[100:]) / 300 for row in rates}
    assert mean["good"] > 3.0 and 0.5 < mean["fair"] < mean["good"] - 1.0 and mean["bad"] < 0.5
    assert run.speed(100) > 1.05 * machine.best_fixed(list(rates.values()))[1], "no common depth does as well"


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_slow_spell_is_no_reason_to_change(name):
    """Everything takes three times as long for a while; what is best stays the best."""
    machine, rates = MACHINES[name], alike(1, 0.85)
    depths, run = AdaptiveDepths(MAX_DEPTH, profile_of(machine)), None
    for factor in (1.0, 3.0, 1.0):
        run = simulate(depths, machine, rates, 80, noise=lambda rng, f=factor: f * jitter()(rng), into=run)
    best_speed = machine.best_fixed(list(rates(0).values()))[1]
    assert run.speed(80, 160) > 0.9 * best_speed
    assert run.speed(160) > 0.9 * best_speed


def test_other_row_counts_are_toured_anew():
    depths = AdaptiveDepths(MAX_DEPTH)
    few = simulate(depths, TINY, alike(2, 0.0), 100)
    assert few.mean_depth(80) == 0
    many = simulate(depths, TINY, alike(16, 0.0), SHALLOW)
    assert [set(step.values()) for step in many.depths] == [{depth} for depth in STOPS[:SHALLOW]]


def test_deep_stops_wait_until_drafting_pays():
    depths, poor, good = AdaptiveDepths(MAX_DEPTH), alike(4, 0.0), alike(4, 0.95)
    run = simulate(depths, CPU, lambda step: good(step) if step >= 60 else poor(step), 160)
    assert max(max(step.values()) for step in run.depths[:60]) == 1
    assert {3, 5} <= {depth for step in run.depths[60:] for depth in step.values()}


@pytest.mark.parametrize("machine", [CPU, GPU, TINY, QUICK], ids=["cpu", "gpu", "tiny", "quick"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_short_texts_on_an_unknown_machine_are_not_slower_than_plain(machine, rows, rate):
    """What is learned costs less than the time of four plain steps."""
    rates = alike(rows, rate)
    plain = machine.speed(list(rates(0).values()), 0)
    assert median(speeds(machine, rates, 64, known=False, seeds=3)) > (1.0 - 4.0 / 64) * plain
    assert median(speeds(machine, rates, 128, known=False, seeds=3)) > 0.955 * plain


@pytest.mark.parametrize(("rows", "rate"), [(1, 0.8), (4, 0.9), (16, 0.0)])
def test_most_steps_are_not_thought_about(monkeypatch, rows, rate):
    depths = AdaptiveDepths(MAX_DEPTH, profile_of(GPU if rate else TINY))
    calls = {"best": 0, "measured": 0}
    honest, observe = depth_module.best, Costs.observe

    def best_spy(*args):
        calls["best"] += 1
        return honest(*args)

    def observe_spy(*args, **options):
        calls["measured"] += 1
        observe(*args, **options)

    monkeypatch.setattr(depth_module, "best", best_spy)
    monkeypatch.setattr(Costs, "observe", observe_spy)
    monkeypatch.setattr(depth_module, "WORTH_ASKING", 1.0)
    run = simulate(depths, GPU if rate else TINY, alike(rows, rate), 600)
    assert (run.mean_depth(100) > 2) == (rate > 0)
    assert calls["best"] < 600 * 0.3 and 600 * 0.2 < calls["measured"] < 600 * 0.55


def test_rows_that_chose_for_themselves_keep_their_depth():
    rates = {"own": flat(0.8), "other": flat(0.8)}
    depths = AdaptiveDepths(MAX_DEPTH, profile_of(TINY))
    run = simulate(depths, TINY, lambda _: rates, 100, fixed={"own": 5})
    assert all(step["own"] == 5 for step in run.depths)
    # Drafting is paid for already; the other row's drafts cost next to nothing beside it.
    assert run.mean_depth(20) > 3
    alone = simulate(AdaptiveDepths(MAX_DEPTH, profile_of(TINY)), TINY, alike(2, 0.8), 100)
    assert alone.mean_depth(20) < 0.1
    plain = simulate(depths, TINY, lambda _: rates, 5, fixed={"own": 0, "other": 0})
    assert plain.mean_depth(0) == 0


def test_limits_are_kept():
    depths = AdaptiveDepths(MAX_DEPTH, profile_of(GPU))
    rng = random.Random(0)
    for _ in range(200):
        wishes = {f"row{n}": Wish(rng.randrange(9), rng.random() < 0.7) for n in range(rng.randrange(1, 6))}
        chosen = depths.choose(wishes, rng.choice([0, 100]))
        assert chosen.keys() == wishes.keys()
        for row, wish in wishes.items():
            assert 0 <= chosen[row] <= wish.limit
            assert wish.adaptive or chosen[row] == wish.limit
    wishes = {"a": Wish(3, True), "b": Wish(0, False)}
    assert FixedDepths().choose(wishes, 0) == {"a": 3, "b": 0}


def request(row: str) -> Request:
    return Request(row, (1,), SamplingParams(), 0, draft_tokens=8, adaptive=True)


def test_steps_with_prompts_teach_no_costs():
    depths = AdaptiveDepths(MAX_DEPTH, profile_of(CPU))
    before = depths.costs.verify.at(2, 0), depths.costs.draft.at(1, 3)
    reading = plan_row(request("new"), 0, known=(1, 2, 3))
    for _ in range(50):
        chosen = depths.choose({"a": Wish(8, True)}, 3)
        plan = Plan((reading, plan_row(request("a"), chosen["a"])), chosen["a"])
        depths.observe(plan, verdict((0, chosen["a"])), StepTimes(0.5, 5.0))
    assert (depths.costs.verify.at(2, 0), depths.costs.draft.at(1, 3)) == before
    assert depths.acceptance.curve("a").stands[1] > 0.9, "of the drafts they teach all the same"


def test_rows_that_left_are_forgotten():
    depths = AdaptiveDepths(MAX_DEPTH, profile_of(GPU))
    simulate(depths, GPU, lambda step: {f"row{step // 5}": flat(0.8), f"other{step // 7}": flat(0.8)}, 500)
    assert len(depths.acceptance) <= 2
    sizes = [len(depths.costs.verify._cells), len(depths.costs.draft._cells)]
    rng = random.Random(0)
    simulate(depths, GPU, lambda _: {f"r{n}": flat(0.5) for n in range(rng.randrange(1, 300))}, 400)
    assert max(sizes) <= 5 and len(depths.acceptance) < 300
    assert all(len(cells) <= 24 for cells in depths.costs.verify._cells.values())
    assert len(depths.costs.verify._cells) < 64, "row counts are taken together where they are large"


def test_a_new_row_starts_from_what_the_others_show():
    acceptance = Acceptance(MAX_DEPTH)
    for _ in range(100):
        acceptance.tick()
        for accepted, row in ((0, "bad"), (3, "good")):
            acceptance.observe(row, 3, accepted)
    good, bad, new = (acceptance.curve(row).gains[3] for row in ("good", "bad", "new"))
    assert good > 2.5 and bad < 0.3 and 0.3 < new < 2.0
    acceptance.keep(["good"])
    assert acceptance.curve("bad").gains == acceptance.curve("new").gains


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MACHINES)
def test_the_best_of_all_steps(name, seed):
    """Against every combination of depths of three rows, one of which has its own."""
    rng, machine = random.Random(seed), MACHINES[name]
    costs = costs_of(machine)
    rates = [flat(rng.random(), 0.05) for _ in range(3)]
    rows = [Candidate(str(n), Curve(rates[n]), rng.randrange(1, 6), n != 2) for n in range(3)]
    ranges = [range(row.limit + 1) if row.free else [row.limit] for row in rows]
    fastest = 0.0
    for depths in itertools.product(*ranges):
        times = machine.times(3, sum(depths), sum(d > 0 for d in depths), max(depths))
        gained = sum(tokens(rate, depth) for rate, depth in zip(rates, depths, strict=True))
        fastest = max(fastest, gained / (times.draft + times.verify))
    found = best(rows, costs)
    assert found.rate == pytest.approx(fastest, rel=0.02)


def test_a_small_promise_is_enough_to_go_on_but_not_to_begin():
    costs = costs_of(CPU)
    as_good_as_plain = costs.seconds(1, 1, 1, 1) / costs.seconds(1, 0, 0, 0) - 1.0
    row = [Candidate("row", Curve([as_good_as_plain + 0.01]), 1, True)]
    assert best(row, costs).depths == (0,)
    assert best(row, costs, margin=1.0).depths == (1,)


def test_no_step_is_free():
    """Through deep drafts alone a line may say that none at all would cost nothing."""
    table = Table(1.0, 0.1, per_row=True)
    for drafts, seconds in ((32, 10.0), (48, 17.0), (64, 24.0)):
        for _ in range(FEW):
            table.add(8, drafts, seconds)
    assert table.at(8, 0) == pytest.approx(10.0 / 8)
    assert table.at(8, 64) == pytest.approx(24.0)


def test_costs_between_those_that_were_measured():
    costs = costs_of(CPU)
    for rows, drafts, depth in ((3, 9, 3), (6, 30, 5), (12, 12, 1), (1, 0, 0)):
        times = CPU.times(rows, drafts, rows if depth else 0, depth)
        expected = times.verify + times.draft
        assert costs.seconds(rows, drafts, rows, depth) == pytest.approx(expected, rel=0.03)
