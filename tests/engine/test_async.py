"""The asynchronous front end: many streams over one engine, each free to leave, none able to harm another."""

import asyncio
import contextlib

import pytest
from engine_cases import STORY, assert_all_free, load

from headlong import AsyncLLM, Completion, HeadlongError, RequestError, SamplingParams
from headlong.engine import loop
from headlong.engine.local import LocalEngine
from headlong.engine.loop import MAX_RESTARTS

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PATIENCE = 60


@pytest.fixture(scope="module")
def sync_llm():
    return load("auto", max_rows=6, cache_tokens=4096)


def running(sync_llm, body):
    """Runs `body(AsyncLLM)` over the module's engine; all must be free afterwards."""

    async def whole():
        llm = AsyncLLM(LocalEngine(sync_llm.service))
        try:
            return await asyncio.wait_for(body(llm), PATIENCE)
        finally:
            await llm.close()

    result = asyncio.run(whole())
    assert_all_free(sync_llm)
    return result


async def until_free(llm: AsyncLLM) -> None:
    """Cancelling is answered by the engine's thread between two steps."""
    while llm.client.service.engine.has_work:
        await asyncio.sleep(0.01)


def params_of(number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=6 + 3 * (number % 5),
        temperature=0.9 * (number % 2),
        seed=number,
        draft_tokens=number % 6,
        logprobs=1,
        n=1 + (number % 7 == 0),
    )


def test_many_streams_equal_the_synchronous_results(sync_llm):
    story = sync_llm.service.text.encode(STORY)
    prompts = [story[number : 2 * number + 3] for number in range(20)]
    truth = [sync_llm.generate(list(p), params_of(number)) for number, p in enumerate(prompts)]

    async def one(llm: AsyncLLM, number: int) -> tuple[Completion, dict[int, str]]:
        await asyncio.sleep(0.01 * (number % 4))
        texts: dict[int, str] = {}
        done: dict[int, Completion] = {}
        async for chunk in llm.stream(prompts[number], params_of(number)):
            texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
        return Completion.joined([done[index] for index in sorted(done)]), texts

    async def body(llm: AsyncLLM):
        return await asyncio.gather(*(one(llm, number) for number in range(20)))

    for (found, texts), wanted in zip(running(sync_llm, body), truth, strict=True):
        assert len(found.choices) == len(wanted.choices)
        for got, right in zip(found.choices, wanted.choices, strict=True):
            assert (got.token_ids, got.text, got.logprobs) == (right.token_ids, right.text, right.logprobs)
            assert texts[got.index] == right.text


def test_generate_and_kinds_of_prompt(sync_llm):
    params = SamplingParams(max_tokens=6)
    chat = [{"role": "user", "content": "Hello!"}]
    ids = sync_llm.service.text.encode("The dog")

    async def body(llm: AsyncLLM):
        return await asyncio.gather(*(llm.generate(p, params) for p in ("The dog", ids, list(ids), chat)))

    text, as_tuple, as_list, answer = running(sync_llm, body)
    assert text.token_ids == as_tuple.token_ids == as_list.token_ids
    assert answer.token_ids == sync_llm.chat(chat, params).token_ids


def test_leaving_the_loop_frees_everything(sync_llm):
    async def body(llm: AsyncLLM):
        async for _ in llm.stream("Once upon a time", LONG):
            break
        await until_free(llm)
        stream = llm.stream("Once upon a time", SamplingParams(max_tokens=400, ignore_eos=True, n=3))
        await anext(stream)
        await stream.aclose()
        await until_free(llm)

    running(sync_llm, body)


def test_a_stream_nobody_starts_costs_nothing(sync_llm):
    async def body(llm: AsyncLLM):
        stream = llm.stream("Once upon a time", LONG)
        await asyncio.sleep(0.05)
        assert not llm.client.service.engine.has_work
        await stream.aclose()

    running(sync_llm, body)


def test_cancelling_a_task_frees_everything_and_spares_the_others(sync_llm):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    truth = sync_llm.generate("The dog ran", params)

    async def body(llm: AsyncLLM):
        doomed = [asyncio.create_task(llm.generate("Once upon a time", LONG)) for _ in range(3)]
        kept = asyncio.create_task(llm.generate("The dog ran", params))
        await asyncio.sleep(0.15)
        for task in doomed:
            task.cancel()
        ended = await asyncio.gather(*doomed, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)
        found = await kept
        await until_free(llm)
        return found

    assert running(sync_llm, body).token_ids == truth.token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([99999], {}, "prompt: 99999"),
        (list(range(10)) * 500, {}, "prompt has 5000 tokens"),
        ("a", {"bad_token_ids": [99999], "n": 3}, "bad_token_ids"),
        ("a", {"draft_tokens": 40}, "draft_tokens"),
        (5, {}, "prompt must be text"),
        ([{"role": "user"}], {}, "messages"),
    ],
)
def test_errors_reach_only_who_caused_them(sync_llm, prompt, params, message):
    async def body(llm: AsyncLLM):
        good = asyncio.create_task(llm.generate("The dog ran", SamplingParams(max_tokens=8)))
        with pytest.raises(RequestError, match=message):
            await llm.generate(prompt, SamplingParams(**params))
        return await good

    found = running(sync_llm, body)
    assert found.token_ids == sync_llm.generate("The dog ran", SamplingParams(max_tokens=8)).token_ids


def test_a_request_of_many_prompts_is_taken_in_between_steps(sync_llm, monkeypatch):
    """Streams that run go on meanwhile; whoever leaves before all were taken in leaves nothing behind."""
    monkeypatch.setattr(loop, "PIECES_SECONDS", 1e-4)
    step, taken = sync_llm.service.engine.step, []

    async def body(llm: AsyncLLM) -> None:
        client = llm.client
        monkeypatch.setattr(
            client.service.engine, "step", lambda: taken.append(len(client._loop._streams)) or step()
        )
        long = asyncio.create_task(llm.generate(STORY, LONG))
        many = client.prepare([(5, 6, 7)] * 100, SamplingParams(max_tokens=1), "many")
        async with contextlib.aclosing(client.stream(many)) as chunks:
            found = [chunk.request_id async for chunk in chunks]
        assert sorted(found) == sorted(request.id for request in many)
        async with contextlib.aclosing(client.stream(client.prepare([(5,)] * 100, LONG, "left"))) as chunks:
            await anext(chunks)
        assert len((await long).token_ids) == LONG.max_tokens
        await until_free(llm)

    running(sync_llm, body)
    assert len({count for count in taken if 1 < count < 90}) > 3


def test_one_engine_in_two_event_loops(sync_llm):
    """Streams of an event loop that has ended harm nobody."""
    llm = AsyncLLM(LocalEngine(sync_llm.service))
    params = SamplingParams(max_tokens=8)

    async def abandon():
        stream = llm.stream("Once upon a time", LONG)
        await anext(stream)

    async def later():
        found = await llm.generate("The dog ran", params)
        await until_free(llm)
        await llm.close()
        return found

    asyncio.run(abandon())
    found = asyncio.run(asyncio.wait_for(later(), PATIENCE))
    assert found.token_ids == sync_llm.generate("The dog ran", params).token_ids


def test_load_off_the_event_loop():
    seen = []

    async def body():
        llm = await AsyncLLM.load(progress=lambda *report: seen.append(report), cache_tokens=2048)
        done = await llm.generate("The dog", SamplingParams(max_tokens=3))
        await llm.close()
        return done

    assert len(asyncio.run(body()).token_ids) == 3 and seen


def test_close_ends_open_streams_with_an_error():
    async def body():
        llm = AsyncLLM(LocalEngine(load("auto", cache_tokens=2048, max_context=None).service))
        tasks = [asyncio.create_task(llm.generate("Once upon a time", LONG)) for _ in range(2)]
        await asyncio.sleep(0.1)
        await llm.close()
        for task in tasks:
            with pytest.raises(HeadlongError, match="closed before this request ended"):
                await asyncio.wait_for(task, PATIENCE)
        with pytest.raises(HeadlongError, match="has been closed"):
            await llm.generate("The dog")
        await llm.close()

    asyncio.run(asyncio.wait_for(body(), PATIENCE))


def test_a_failing_step_reaches_every_stream(monkeypatch):
    async def body():
        service = load("auto", cache_tokens=2048, max_context=None).service
        llm = AsyncLLM(LocalEngine(service))
        tasks = [asyncio.create_task(llm.generate("Once upon a time", LONG)) for _ in range(3)]
        await asyncio.sleep(0.1)

        def fail():
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(service.engine, "step", fail)
        for task in tasks:
            with pytest.raises(RuntimeError, match="the device is gone"):
                await asyncio.wait_for(task, PATIENCE)
        for _ in range(MAX_RESTARTS):  # the engine begins anew, a bounded number of times
            assert llm.failure is None
            with pytest.raises(RuntimeError, match="the device is gone"):
                await asyncio.wait_for(llm.generate("The dog"), PATIENCE)
        with pytest.raises(HeadlongError, match=r"stopped after an error.*the device is gone.*did not help"):
            await asyncio.wait_for(llm.generate("The dog"), PATIENCE)
        assert llm.failure is not None
        await llm.close()

    asyncio.run(asyncio.wait_for(body(), PATIENCE))


def test_submitting_while_it_closes_never_hangs():
    async def ask(llm: AsyncLLM) -> None:
        with contextlib.suppress(HeadlongError):
            while True:
                await llm.generate("The dog", SamplingParams(max_tokens=2))

    async def body():
        llm = AsyncLLM(LocalEngine(load("auto", cache_tokens=2048, max_context=None).service))
        tasks = [asyncio.create_task(ask(llm)) for _ in range(6)]
        await asyncio.sleep(0.1)
        await llm.close()
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(body(), PATIENCE))


def test_a_cancelled_request_ends_its_stream(sync_llm):
    """Nobody leaves: whoever reads the stream is told, and the other choice goes on."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, n=2, seed=1, temperature=0.5)
    truth = sync_llm.generate("The dog ran", params)

    async def body(llm: AsyncLLM):
        requests = llm.client.prepare([llm.client.text.encode("The dog ran")], params, "two")
        done: dict[int, Completion] = {}
        async for chunk in llm.client.stream(requests):
            if not done and chunk.index == 0 and len(requests) == 2:
                llm.client.cancel([requests[0].id, "no such request"])
                requests.pop()
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
        llm.client.cancel([request.id for request in requests])  # they have ended: no error
        await until_free(llm)
        return done

    done = running(sync_llm, body)
    assert done[0].finish_reason == "cancelled"
    assert truth.token_ids[: len(done[0].token_ids)] == done[0].token_ids and len(done[0].token_ids) < 24
    assert done[1].token_ids == truth.choices[1].token_ids


def test_draining_finishes_what_there_is(sync_llm):
    async def body(llm: AsyncLLM):
        running = [
            asyncio.create_task(llm.generate("The dog ran", SamplingParams(max_tokens=12))) for _ in range(9)
        ]
        while not sync_llm.engine.has_work:
            await asyncio.sleep(0.01)
        await llm.client.drain()
        with pytest.raises(HeadlongError, match="takes nothing new"):
            await llm.generate("The dog")
        assert llm.failure is not None and not sync_llm.engine.has_work
        return await asyncio.gather(*running, return_exceptions=True)

    truth = sync_llm.generate("The dog ran", SamplingParams(max_tokens=12)).token_ids
    found = running(sync_llm, body)
    finished = [one for one in found if isinstance(one, Completion)]
    assert finished and all(one.token_ids == truth for one in finished)
    assert all("takes nothing new" in str(one) for one in found if one not in finished)


def test_draining_before_the_first_request():
    async def body():
        llm = AsyncLLM(LocalEngine(load("auto", cache_tokens=2048, max_context=None).service))
        await llm.client.drain()
        with pytest.raises(HeadlongError, match="takes nothing new"):
            await llm.generate("The dog")
        await llm.close()

    asyncio.run(asyncio.wait_for(body(), PATIENCE))
