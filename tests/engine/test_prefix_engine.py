"""Rows that find their beginning in the prefix cache give the tokens they give without one, and less is read.

The truth is each request alone, without drafts and without the cache. `drive` checks pages, holders, slots, hashes and
stores after every step, and that everything is free at the end.
"""

import random
import time
from dataclasses import replace

import pytest
from engine_cases import load as load_embedded
from engine_cases import plain_alone, requests_of, with_depth
from prefix_cases import PARAMS, Served, ask, cached_of, drafts_of, tokens_of

from headlong import SamplingParams
from headlong.speculate.depth import FixedDepths
from headlong.state.deferred_kv import DeferredKv
from support import tiny, tiny_llama
from support.steps import load

MODELS = {
    "dense": lambda folder: tiny.make(folder, "dense", seed=5),
    "moe": lambda folder: tiny.make(folder, "moe", seed=6),
    "latent": lambda folder: tiny.make(folder, "deepseek_v3", seed=8),
    "llama": lambda folder: tiny_llama.make(folder, seed=7),
}
ATTENTION = ("llama", "latent")
"""Those without recurrent layers."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By name and by whether there is a head, or where."""
    made = {}
    for name, make in MODELS.items():
        folder = tmp_path_factory.mktemp(name) / "model"
        make(folder)
        made |= {(name, mtp): load(folder, mtp=mtp) for mtp in ("on", "off")}
        made[name, "cpu"] = load(folder, draft_device="cpu")
    return made


@pytest.fixture(scope="module", params=["dense", "llama", "latent"])
def family(request, models):
    """With recurrent layers, and without in two ways: its name, and the model with its head."""
    return request.param, models[request.param, "on"]


@pytest.fixture(scope="module")
def dense(models):
    return models["dense", "on"]


class Fixed(FixedDepths):
    """One depth for everybody, as far as a row can go."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def choose(self, wishes, num_prompt_tokens):  # noqa: ARG002
        return {row_id: min(self.depth, wish.limit) for row_id, wish in wishes.items()}


def truth_of(built, *requests):
    alone = Served.of(built, prefix_cache=False)
    results = {}
    for request in requests:
        results |= alone.run(replace(request, draft_tokens=0)).results
    return results


@pytest.mark.parametrize(
    ("name", "kind"), [*(("dense", kind) for kind in PARAMS), ("llama", "penalties"), ("moe", "seeded")]
)
def test_a_conversation(models, name, kind):
    """Every turn finds all of the turns before it, generated text included, with drafting and without."""
    cached = {}
    for mtp, depth in (("on", 3), ("off", 0)):
        built = models[name, mtp]
        served, fresh = Served.of(built), Served.of(built, prefix_cache=False)
        prompt, cached[depth] = tokens_of(1, 50), []
        for turn in range(4):
            request = ask(f"turn{turn}", prompt, depth, **PARAMS[kind])
            trace = served.run(request)
            assert trace.results == truth_of(built, request)
            # The head was given back all it knew: it drafts what it would have drafted.
            assert drafts_of(trace, request.id) == drafts_of(fresh.run(request), request.id)
            cached[depth].append(cached_of(trace)[request.id])
            read = sum(row.query_len for plan in trace.plans for row in plan.rows if row.known_tokens)
            assert read == len(prompt) - cached[depth][-1]
            prompt = (*prompt, *trace.results[request.id].token_ids, *tokens_of(90 + turn, 7))
    # Of the last turn all but the token that was never fed; without checkpoints one more is read again.
    gap = 1 + (name in ATTENTION)
    assert cached[3] == cached[0] == [0, *(50 + 12 + 19 * turn - gap for turn in range(3))]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", ["dense", "llama"])
def test_a_head_on_another_device(models, name, kind):
    """Its pages are copied over there, and the pair at the boundary is read over there: hits and drafts are the same
    as those of a head beside its target."""
    cached = {}
    for device in (None, "cpu"):
        built = models[name, "on" if device is None else device]
        served = Served.of(built, draft_device=device)
        fresh = Served.of(built, draft_device=device, prefix_cache=False)
        prompt, cached[device] = tokens_of(1, 50), []
        for turn in range(4):
            request = ask(f"turn{turn}", prompt, 3, **PARAMS[kind])
            trace = served.run(request)
            assert trace.results == truth_of(built, request)
            assert drafts_of(trace, request.id) == drafts_of(fresh.run(request), request.id)
            cached[device].append(cached_of(trace)[request.id])
            prompt = (*prompt, *trace.results[request.id].token_ids, *tokens_of(90 + turn, 7))
    assert cached["cpu"] == cached[None] and all(cached["cpu"][1:])


@pytest.mark.parametrize("room", [0, 30, 1000])
def test_rows_that_pause_leave_as_much_as_those_that_draft(models, room):
    """Depth 0 is a legal choice at every step: what the head puts off is written before others use the pages, or, as
    far as there is room to remember it, when they do. So the hits are those without MTP, and the drafts those of a row
    that never found anything."""
    cached, deferred = {}, []
    for mtp in ("on", "off"):
        built = models["dense", mtp]
        served, fresh = Served.of(built), Served.of(built, prefix_cache=False)
        served.engine.state.deferred_kv = DeferredKv(room)
        prompt, cached[mtp] = tokens_of(1, 50), []
        for turn in range(4):
            depth = 3 * (turn % 2) if mtp == "on" else 0
            for one in (served, fresh):
                one.engine.depths = one.engine.scheduler.depths = Fixed(depth)
            request = ask(f"turn{turn}", prompt, 3 * (mtp == "on"), max_tokens=20)
            request = replace(request, adaptive=mtp == "on")
            trace = served.run(request)
            assert trace.results == truth_of(built, request)
            assert drafts_of(trace, request.id) == drafts_of(fresh.run(request), request.id)
            assert any(drafted for drafted, _ in drafts_of(trace, request.id)) == (depth > 0)
            cached[mtp].append(cached_of(trace)[request.id])
            deferred.append(served.engine.state.deferred_kv.num_pairs)
            prompt = (*prompt, *trace.results[request.id].token_ids, *tokens_of(90 + turn, 7))
    assert cached["on"] == cached["off"] and all(cached["on"][1:])
    assert (
        (deferred[0] > 0) == (room > 0) and deferred[1] < deferred[0] + (room == 0) and not any(deferred[4:])
    )


def test_a_prompt_asked_again(family):
    name, built = family
    served = Served.of(built)
    prompts = [tokens_of(2, length) for length in (40, 48, 49, 15, 16, 17)]
    for number, prompt in enumerate(prompts):
        requests = [ask(f"{number}.{i}", prompt, depth, max_tokens=5) for i, depth in enumerate((3, 8, 0))]
        truth = truth_of(built, *requests)
        for request in requests:
            assert served.run(request).results[request.id] == truth[request.id]
    found = [count for _, count in served.admitted]
    if name not in ATTENTION:
        assert found[:6] == [0, 32, 32, 32, 32, 32]  # 40 tokens, then 48 that begin with them
    assert all(count for count in found[1:9])


def test_shared_beginnings_at_the_same_time(family):
    """Rows with one beginning that run side by side; those that come later find what the first read."""
    _, built = family
    stem = tokens_of(3, 70)
    requests = [
        ask(
            f"row{n}",
            (*stem, *tokens_of(30 + n, 5 + 9 * n)),
            (3, 0, 5)[n % 3],
            **list(PARAMS.values())[n % 3],
        )
        for n in range(8)
    ]
    served = Served.of(built, max_rows=8, chunk_tokens=48)
    trace = served.run(*requests, arrivals=[0, 0, 3, 4, 6, 8, 8, 9])
    assert trace.results == truth_of(built, *requests)
    found = cached_of(trace)
    assert sum(count > 0 for count in found.values()) >= 5 and max(found.values()) >= 63


def test_a_row_that_stopped_inside_accepted_drafts():
    """Its next turn goes on from the cut: after the stop, which was fed as a draft. Without drafts the stop was not
    fed, and is read again."""
    llm, plain = load_embedded("auto"), load_embedded("auto", prefix_cache=False)
    prompt = llm.service.text.encode("Once upon a time")
    free = SamplingParams(max_tokens=40, ignore_eos=True)
    produced, stop = [], None
    for output in Served(llm.engine).run(*with_depth(requests_of(llm, [(prompt, free)]), [8])).outputs:
        for place, token in enumerate(output.token_ids):
            if place < output.num_accepted and len(produced) > 8 and token not in produced:
                stop = stop or token
            produced.append(token)
    assert stop is not None
    for depth, cut in ((8, 0), (0, -1)):
        llm.engine.state.drop_cache()
        stopped = requests_of(llm, [(prompt, replace(free, stop_token_ids=(stop,)))])
        done = Served(llm.engine).run(*with_depth(stopped, [depth])).results["case0.0"].token_ids
        again = with_depth(requests_of(llm, [((*prompt, *done, *prompt), free)]), [depth])
        trace = Served(llm.engine).run(*again)
        assert trace.results == plain_alone(plain, again)
        assert cached_of(trace)["case0.0"] == len(prompt) + len(done) + cut


@pytest.mark.parametrize("depth", [3, 8])
def test_what_is_left_to_read_has_the_shape_of_a_verification(family, depth):
    """A hit leaves exactly depth + 1 tokens, read in a step where another row verifies depth drafts."""
    name, built = family
    prompt = tokens_of(4, 32)
    served = Served.of(built)
    done = served.run(ask("first", prompt, depth)).results["first"].token_ids
    left = depth + 1 - (name in ATTENTION)
    requests = [
        ask("other", tokens_of(5, 20), depth, max_tokens=30),
        ask("again", (*prompt, *done[:-1], *tokens_of(6, left)), depth, **PARAMS["seeded"]),
    ]
    trace = served.run(*requests, arrivals=[0, 2])
    assert trace.results == truth_of(built, *requests)
    assert any(
        sorted((row.query_len, bool(row.known_tokens)) for row in plan.rows)
        == [(depth + 1, False), (depth + 1, True)]
        for plan in trace.plans
    )


@pytest.mark.parametrize("stores", [(0, 0), (6000, 0), (0, 40_000), (9000, 9000), (12_000, 30_000)])
def test_stores_of_any_size(dense, stores):
    """Checkpoints of some 5,700 bytes each, pushed to host memory and away."""
    served = Served.of(dense, prefix_device_bytes=stores[0], prefix_host_bytes=stores[1])
    truth = Served.of(dense, prefix_cache=False)
    checkpoints = served.engine.state.prefix.checkpoints
    prompts = {n: tokens_of(40 + n, 30) for n in range(3)}
    hits = 0
    for turn in range(3):
        for n, prompt in prompts.items():
            request = ask(f"{turn}.{n}", prompt, 3, max_tokens=6)
            trace = served.run(request)
            assert trace.results == truth.run(request).results
            hits += cached_of(trace)[request.id] > 0
            prompts[n] = (*prompt, *trace.results[request.id].token_ids, *tokens_of(turn, 3))
            assert all(held <= limit for held, limit in zip(checkpoints.num_bytes, stores, strict=True))
    assert hits == {0: 0, 40_000: 6, 42_000: 6}.get(sum(stores), hits)
    assert bool(len(checkpoints)) == (sum(stores) > 0)


def test_pages_are_taken_from_what_is_kept(family):
    """Room for two contexts; the oldest of what is kept goes, and nothing waits for it."""
    _, built = family
    served = Served.of(built, cache_tokens=160, max_rows=2)
    for number in range(6):
        request = ask(f"row{number}", tokens_of(60 + number % 4, 60), 3, max_tokens=4)
        trace = served.run(request)
        assert trace.results == truth_of(built, request)
        assert len(trace.plans[0].rows) == 1
    state = served.engine.state
    assert 0 < len(state.prefix) <= state.pages.size == 10


def test_rows_put_back_go_on_from_what_they_had(family):
    """Six rows of two pages grow to four each; there are sixteen pages."""
    _, built = family
    requests = [
        ask(
            f"row{n}",
            tokens_of(70 + n, 17 + n),
            (3, 0, 8)[n % 3],
            max_tokens=30,
            **list(PARAMS.values())[n % 3],
        )
        for n in range(6)
    ]
    served = Served.of(built, cache_tokens=256, max_rows=6)
    trace = served.run(*requests)
    assert trace.preempted
    assert trace.results == truth_of(built, *requests)
    assert any(count for _, count in served.admitted), "none found anything of what it had"
    assert len(served.admitted) == 6 + len(trace.preempted)


def test_rows_that_never_draft(dense):
    """They use everybody's pages; those who draft cannot use theirs, whose keys for the head are missing."""
    served = Served.of(dense)
    prompt = tokens_of(8, 40)
    found = []
    for number, depth in enumerate((0, 0, 3, 0, 3)):
        request = ask(f"row{number}", prompt, depth)
        trace = served.run(request)
        assert trace.results == truth_of(dense, request)
        found.append(cached_of(trace)[request.id])
    assert found == [0, 32, 0, 32, 32]


def test_dropping_the_cache_while_rows_run(dense):
    served = Served.of(dense)
    requests = [ask(f"row{n}", (*tokens_of(9, 33), n), 3, max_tokens=20) for n in range(3)]
    engine = served.engine
    steps = engine.step

    def step():
        engine.state.drop_cache()
        return steps()

    served.run(ask("before", tokens_of(9, 40), 3))
    engine.step = step  # type: ignore[method-assign]
    trace = served.run(*requests, arrivals=[0, 1, 3])
    assert trace.results == truth_of(dense, *requests)
    assert not any(cached_of(trace).values())


def test_off_means_off(dense):
    served = Served.of(dense, prefix_cache=False)
    for number in range(2):
        trace = served.run(ask(f"row{number}", tokens_of(9, 40), 3))
        assert not any(cached_of(trace).values())
        assert [row.query_len for row in trace.plans[0].rows] == [40], "nothing is cut for checkpoints"
    assert not len(served.engine.state.prefix)


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules(family, seed):
    """Beginnings in common, any depth, any order, little room, small stores, rows that are cancelled."""
    name, built = family
    rng = random.Random(f"{name}{seed}")
    stems = [tokens_of(100 + n, 75) for n in range(2)]
    requests = [
        ask(
            f"row{n}",
            (*rng.choice(stems)[: rng.randrange(75)], *tokens_of(rng.randrange(3), rng.randrange(1, 20))),
            rng.choice((0, 1, 3, 8)),
            max_tokens=rng.randrange(1, 24),
            priority=rng.choice((0, 0, 0, -1, 2)),
            **rng.choice(list(PARAMS.values())),
        )
        for n in range(14)
    ]
    served = Served.of(
        built,
        cache_tokens=rng.choice((144, 224, 400)),
        max_rows=rng.choice((2, 3, 5)),
        chunk_tokens=rng.choice((4, 9, 33, 64)),
        prefix_device_bytes=rng.choice((0, 15_000, 100_000)),
        prefix_host_bytes=rng.choice((0, 15_000)),
    )
    leaving = {f"row{n}": rng.randrange(20) for n in rng.sample(range(14), 3)}
    trace = served.run(*requests, arrivals=[rng.randrange(25) for _ in requests], cancel=leaving)
    truth = truth_of(built, *requests)
    for request in requests:
        got = trace.results[request.id].token_ids
        if request.id in leaving:
            assert got == truth[request.id].token_ids[: len(got)]
        else:
            assert trace.results[request.id] == truth[request.id], request


@pytest.fixture(scope="module")
def long_llm():
    return load_embedded("auto", max_context=4096, cache_tokens=16384)


def timed(llm, name, prompt, depth):
    """Seconds to the first token, cached tokens, and the tokens."""
    request = requests_of(llm, [(prompt, SamplingParams(max_tokens=8, ignore_eos=True))])[0]
    llm.engine.add(replace(request, id=name, draft_tokens=depth, adaptive=False))
    started, seconds, cached, tokens = time.perf_counter(), 0.0, 0, []
    while llm.engine.has_work:
        for output in llm.engine.step().rows:
            if output.is_first:
                seconds, cached = time.perf_counter() - started, output.num_cached
            tokens.extend(output.token_ids)
    return seconds, cached, tokens


@pytest.mark.serial
@pytest.mark.parametrize("depth", [3, 0])
def test_the_second_turn_over_a_long_prefix_begins_at_once(long_llm, depth):
    """3,000 tokens that two turns share: the second reads what is new alone, and says what it would have said."""
    llm = long_llm
    llm.engine.state.drop_cache()
    shared = (llm.service.text.encode(" The fox and the bear went to the river again.") * 300)[:3000]
    first, cached, tokens = timed(llm, "first", shared, depth)
    assert cached == 0
    prompt = (*shared, *tokens, *llm.service.text.encode("\nAnd then what did the bear say to the fox?"))
    second, cached, tokens = timed(llm, "second", prompt, depth)
    print(f"depth {depth}: {first:.3f} s, then {second:.3f} s: {first / second:.1f}x")
    assert cached == 3000 + 8 - 1
    assert first > 5 * second
    llm.engine.state.drop_cache()
    assert timed(llm, "afresh", prompt, depth)[1:] == (0, tokens)


def test_requests_share_a_prefix_only_where_their_extras_are_equal(family):
    """Nothing kept under other extras is taken; the tokens are the same all the same, since no model reads extras."""
    _, built = family
    served, prompt = Served.of(built), tokens_of(7, 50)
    mine, other = ((0, b"mine"),), ((0, b"other"),)
    requests = [
        replace(ask(str(n), prompt, drafts=3), prefix_extras=extras)
        for n, extras in enumerate((mine, mine, other, (), other))
    ]
    found = [served.run(request) for request in requests]
    cached = [cached_of(trace)[request.id] for trace, request in zip(found, requests, strict=True)]
    assert cached[0] == cached[2] == cached[3] == 0 < cached[1] == cached[4]
    texts = {trace.results[request.id].token_ids for trace, request in zip(found, requests, strict=True)}
    assert len(texts) == 1
