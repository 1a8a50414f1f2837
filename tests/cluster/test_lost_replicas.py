"""Requests whose replicas are lost end as if nothing had happened, or with a sentence that says why not."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from headlong import HeadlongError, RequestError, SamplingParams
from headlong.cluster import call
from headlong.errors import HarmfulError
from headlong.params import Grammar

SHAPE = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}}}')
KINDS = {
    "greedy": {"logprobs": 2},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "n": 3, "seed": 5, "logprobs": 0},
    "penalised": {"temperature": 0.8, "seed": 1, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "schema": {"grammar": SHAPE, "temperature": 1.0, "seed": 2},
    "stops": {"stop": (". ", "day"), "min_tokens": 8, "temperature": 1.0, "seed": 3},
    "banned": {"banned_strings": ("the",), "temperature": 0.7, "seed": 4},
    "prompt": {"prompt_logprobs": 1, "logprobs": 1},
}


def visible(chunks):
    """All that a client can see of one choice, but for how it was cut and how long it took."""
    done = chunks[-1].completion
    return (
        done.text,
        done.token_ids,
        done.logprobs,
        done.finish_reason,
        done.stop_reason,
        done.prompt_logprobs,
        done.stats.prompt_tokens,
        "".join(chunk.text for chunk in chunks),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(entry for chunk in chunks for entry in chunk.logprobs),
    )


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [("sampled", [0]), ("sampled", [3]), *((kind, [1, -1, 2, 5]) for kind in KINDS)],
    ids=str,
)
def test_a_lost_replica_changes_nothing(world, kind, cuts):
    params = SamplingParams(max_tokens=24, **KINDS[kind])
    truth = asyncio.run(world.run(world.engines[0], params))
    world.reset()
    world.fleet.cuts.extend(cuts)
    found = asyncio.run(world.run(world.front, params))
    assert {key: visible(one) for key, one in found.items()} == {
        key: visible(one) for key, one in truth.items()
    }
    assert len(world.fleet.calls) == 1 + len(cuts)
    first, *later = (work for _, work in world.fleet.calls)
    assert not first.fingerprint and not any(request.resumed for request in first.requests)
    if cuts == [3]:
        begun = [request for request in later[0].requests if request.resumed]
        assert begun and later[0].fingerprint == world.replicas[0].facts.fingerprint
        assert later[0].avoid == (world.fleet.calls[0][0],)
        given = {one.id: one for one in world.front.replicas()}[world.fleet.calls[1][0]]
        assert given.taken_over == len(begun) and given.repeated == len(later[0].requests) - len(begun)
        assert {one.id: one for one in world.front.replicas()}[world.fleet.calls[0][0]].state == "lost"


def test_prompts_go_their_own_ways(world):
    prompts = ("Tim and Mia went", "The dog", "Once upon a time", "There was a big")
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=8, n=2)
    truth = asyncio.run(world.run(world.engines[0], params, prompts))
    world.reset()
    world.fleet.cuts.extend([2, None, 4, 0])
    found = asyncio.run(world.run(world.front, params, prompts))
    assert {key: visible(one) for key, one in found.items()} == {
        key: visible(one) for key, one in truth.items()
    }
    assert list(found) == list(truth) and len(world.fleet.calls) == 7


def test_without_a_seed_it_is_drawn_once(world):
    """The noise of what is sent again is that of the first time."""
    world.fleet.cuts.extend([2, 2])
    params = SamplingParams(max_tokens=16, temperature=1.0)
    found = asyncio.run(world.run(world.front, params))
    seeds = {request.seed for _, work in world.fleet.calls for request in work.requests}
    assert len(seeds) == 1
    truth = asyncio.run(world.run(world.engines[0], replace(params, seed=seeds.pop())))
    assert [visible(one) for one in found.values()] == [visible(one) for one in truth.values()]


@pytest.mark.parametrize("verify", ["ratio", "block"])
def test_drafted_distributions_are_not_resumed(world, verify):
    params = SamplingParams(max_tokens=16, temperature=1.0, verify=verify, seed=1, ignore_eos=True)
    world.fleet.cuts.append(2)
    (chunks,) = asyncio.run(world.run(world.front, params)).values()
    done = chunks[-1].completion
    assert done.finish_reason == "error" and f"verify '{verify}' cannot be resumed" in done.stop_reason
    assert len(world.fleet.calls) == 1 and done.token_ids
    world.reset()
    world.fleet.cuts.append(0)  # what streamed nothing can begin anew
    (chunks,) = asyncio.run(world.run(world.front, params)).values()
    assert chunks[-1].finish_reason == "length"
    world.reset()
    world.fleet.cuts.append(2)  # greedily the draft changes nothing
    (chunks,) = asyncio.run(world.run(world.front, replace(params, temperature=0.0))).values()
    assert chunks[-1].finish_reason == "length"


def test_only_its_like_goes_on(world, monkeypatch):
    other = world.replicas[1]
    monkeypatch.setattr(other, "facts", replace(other.facts, fingerprint="another"))
    world.board.poll()
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    world.fleet.cuts.append(2)
    (chunks,) = asyncio.run(world.run(world.front, params)).values()
    done = chunks[-1].completion
    assert done.finish_reason == "error" and "no other can go on with it" in done.stop_reason
    assert [name for name, _ in world.fleet.calls] == ["a", "b"] and len(done.token_ids) >= 2
    world.reset()
    world.fleet.cuts.append(0)
    (chunks,) = asyncio.run(world.run(world.front, params)).values()
    assert chunks[-1].finish_reason == "length"
    assert [name for name, _ in world.fleet.calls] == ["a", "b"], "what streamed nothing may begin on any"


def test_another_model_is_never_given_its_tokens(world, monkeypatch):
    monkeypatch.setattr(world.replicas[1], "facts", replace(world.replicas[1].facts, model="another"))
    world.board.poll()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for _ in range(2):
        (chunks,) = asyncio.run(world.run(world.front, params)).values()
        assert chunks[-1].finish_reason == "length"
    monkeypatch.setattr(world.replicas[0], "facts", replace(world.replicas[0].facts, model="another"))
    world.board.poll()
    with pytest.raises(HeadlongError, match="no replica can take this request"):
        asyncio.run(world.run(world.front, params))


def test_a_request_that_ends_replicas_is_given_up(world, monkeypatch):
    """Those that it never reached do not count; from the third on it is alone with each."""
    monkeypatch.setattr(call, "PAUSE_SECONDS", 0.0)
    world.fleet.cuts.extend([0, -1, -1, 0, -1, 0, 0, 0])
    with pytest.raises(HarmfulError, match="5 replicas were lost to this request"):
        asyncio.run(world.run(world.front, SamplingParams(max_tokens=4, n=2)))
    assert [work.alone for _, work in world.fleet.calls] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_call_on_trial_gives_what_it_gives(world, monkeypatch):
    monkeypatch.setattr(call, "PAUSE_SECONDS", 0.0)
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=6, n=3, logprobs=1)
    truth = asyncio.run(world.run(world.engines[0], params))
    world.reset()
    world.fleet.cuts.extend([2, 0, 9, 1, 5])
    found = asyncio.run(world.run(world.front, params))
    assert {key: visible(one) for key, one in found.items()} == {
        key: visible(one) for key, one in truth.items()
    }
    assert [work.alone for _, work in world.fleet.calls] == [0, 0, 1, 8, 8, 8], "it came through one in vain"


def test_a_request_that_is_wrong_is_refused_before_it_is_sent(world):
    with pytest.raises(RequestError, match="context is"):
        world.front.prepare([(1,) * 2000], SamplingParams(), "long")
    with pytest.raises(RequestError, match="draft_tokens 60 is above"):
        world.front.prepare([(1,)], SamplingParams(draft_tokens=60), "deep")
    with pytest.raises(RequestError, match="grammar"):
        world.front.prepare([(1,)], SamplingParams(grammar=Grammar("regex", "(")), "wrong")
    assert not world.fleet.calls


def test_leaving_early_frees_the_rows(world):
    async def leave():
        requests = world.front.prepare(
            [(1, 2, 3)], SamplingParams(max_tokens=900, ignore_eos=True, n=2), "gone"
        )
        async with aclosing(world.front.stream(requests)) as chunks:
            async for _ in chunks:
                break
        for _ in range(200):
            if not any(engine.service.engine.has_work for engine in world.engines):
                return True
            await asyncio.sleep(0.02)

    assert asyncio.run(leave())


def test_cancelled_draining_and_closed(world):
    async def story():
        params = SamplingParams(max_tokens=900, ignore_eos=True, n=2)
        requests = await asyncio.to_thread(world.front.prepare, [(1, 2, 3)], params, "story")
        reasons, draining = {}, None
        async with aclosing(world.front.stream(requests)) as chunks:
            async for chunk in chunks:
                if draining is None:
                    draining = asyncio.create_task(world.front.drain())
                    world.front.cancel([requests[0].id])
                    await asyncio.sleep(0)
                    with pytest.raises(HeadlongError, match="shutting down"):
                        await anext(world.front.stream(requests))
                if chunk.finish_reason is not None:
                    reasons[chunk.request_id] = chunk.finish_reason
                    assert not draining.done()
        await asyncio.wait_for(draining, 5)
        assert reasons == {requests[0].id: "cancelled", requests[1].id: "length"}

    asyncio.run(story())
    world.reset()

    async def closed():
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        requests = await asyncio.to_thread(world.front.prepare, [(1, 2, 3)], params, "closed")
        async for _ in world.front.stream(requests):
            await world.front.close()

    with pytest.raises(HeadlongError, match="closed before"):
        asyncio.run(closed())


def test_replicas_as_one_engine(world):
    asyncio.run(world.run(world.front, SamplingParams(max_tokens=9, ignore_eos=True)))
    world.board.poll()
    description, stats = world.front.description, world.front.stats()
    assert (
        description.max_rows == 16
        and stats.usage.pages_total == 2 * world.replicas[0].report().stats.usage.pages_total
    )
    alone = [engine.stats().totals.generated_tokens for engine in world.engines]
    assert stats.totals.generated_tokens == sum(alone)
    assert [(one.id, one.state, one.requests) for one in world.front.replicas()] == [
        ("a", "ready", 1),
        ("b", "ready", 0),
    ]
    assert world.front.failure is None
