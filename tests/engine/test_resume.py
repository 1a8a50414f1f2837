"""A request that was cut short goes on elsewhere as if nothing had happened: at every token, whatever it asked for."""

import random
from dataclasses import replace

import pytest
from engine_cases import Result, assert_same, drive, mixed_cases, requests_of

from headlong import RequestError, SamplingParams
from headlong.completion import Chunk
from headlong.engine.resume import Delivered
from headlong.params import Grammar
from headlong.types import Request, RowOutput

NUMBERS = Grammar(
    "json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
)
CONSTRAINED = (
    {"grammar": NUMBERS, "logprobs": 1},
    {"grammar": Grammar("regex", "(yes|no|perhaps)( and (yes|no|perhaps)){3}"), "temperature": 1.0, "n": 2},
    {"grammar": Grammar("choice", '["a long answer", "another long answer"]'), "temperature": 1.0},
    {"banned_strings": ("the", "and"), "temperature": 0.9, "ignore_eos": True},
    {"stop": ("e", "the time", "day"), "include_stop": True, "min_tokens": 6, "temperature": 1.0},
    {"prompt_logprobs": 2, "logprobs": 2, "temperature": 0.8, "n": 2},
)


def cases_of(llm, max_tokens: int) -> list[Request]:
    prompt = llm.service.text.encode("Once upon a time there was")
    own = [
        (prompt, SamplingParams(**({"seed": 7, "max_tokens": max_tokens} | params))) for params in CONSTRAINED
    ]
    mixed = [replace(request, id=f"mixed/{request.id}") for request in mixed_cases(llm, 3, max_tokens)]
    return [*requests_of(llm, own), *mixed]


def plain_outputs(llm, requests: list[Request]) -> dict[str, list[RowOutput]]:
    """Each request's outputs, a token each, with nothing interrupted."""
    found: dict[str, list[RowOutput]] = {request.id: [] for request in requests}
    for output in drive(llm, [replace(r, draft_tokens=0, adaptive=False) for r in requests]).outputs:
        found[output.request.id].append(output)
    return found


def after(outputs: list[RowOutput], count: int) -> Result:
    """What is left of them after so many tokens."""
    rest, last = outputs[count:], outputs[-1]
    return Result(
        token_ids=tuple(token for output in rest for token in output.token_ids),
        text="".join(output.text for output in rest),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(entry for output in rest for entry in output.logprobs),
    )


def check_cuts(llm, requests: list[Request], cuts) -> int:
    truth, pieces, wanted = plain_outputs(llm, requests), [], {}
    for request in requests:
        outputs = truth[request.id]
        tokens = tuple(token for output in outputs for token in output.token_ids)
        assert len(tokens) == len(outputs) > 1
        for count in cuts(len(tokens)):
            piece = replace(request, id=f"{request.id}@{count}", resumed=tokens[:count])
            pieces.append(piece)
            wanted[piece.id] = after(outputs, count)
    llm.engine.state.drop_cache()
    random.Random(0).shuffle(pieces)
    assert_same(drive(llm, pieces).results, wanted, pieces)
    return len(pieces)


def test_cut_here_and_there(llm):
    rng = random.Random(5)
    assert check_cuts(llm, cases_of(llm, 16), lambda length: [rng.randrange(1, length)]) > 20


@pytest.mark.slow
def test_cut_at_every_token(llm_of_dtype):
    assert check_cuts(llm_of_dtype, cases_of(llm_of_dtype, 16), lambda length: range(1, length)) > 150


def run(llm, request: Request, delivered: Delivered, limit: int | None = None) -> list[Chunk]:
    """The request's chunks; after `limit` of them its engine is lost."""
    engine, collector, chunks = llm.engine, llm.service.collector(request), []
    engine.add(request)
    while engine.has_work and (limit is None or len(chunks) < limit):
        step = engine.step()
        if not step.rows:
            collector.wait(step)
        chunks += [delivered.take(collector.take(step, output)) for output in step.rows]
    engine.cancel(request.id)
    return chunks


@pytest.mark.parametrize("cuts", [(1,), (2, 1), (1, 1, 3), (0,)])
def test_the_whole_completion_is_told_at_the_end(llm, cuts):
    """Usage, log-probabilities and what was found out about the prompt, over several engines that were lost."""
    params = SamplingParams(
        max_tokens=20, prompt_logprobs=1, logprobs=1, temperature=0.8, seed=3, ignore_eos=True
    )
    (request,) = llm.service.requests(llm.service.text.encode("The dog ran to the"), params, "whole")
    request = replace(request, draft_tokens=0, adaptive=False)
    truth = run(llm, request, Delivered(request, llm.service.head_refusal))[-1].completion
    delivered, chunks = Delivered(request, llm.service.head_refusal), []
    for cut in cuts:
        chunks += run(llm, delivered.rest(), delivered, cut)
        llm.engine.state.drop_cache()
    assert not delivered.ended and delivered.begun == bool(sum(cuts))
    chunks += run(llm, delivered.rest(), delivered)
    whole = chunks[-1].completion
    assert delivered.ended and [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == whole.text
    stats = replace(
        whole.stats,
        **{name: getattr(truth.stats, name) for name in ("prompt_seconds", "decode_seconds")},
        **{name: getattr(truth.stats, name) for name in ("queue_seconds", "prefill_seconds")},
    )
    assert replace(whole, stats=stats) == truth
    assert whole.stats.decode_seconds > 0 and whole.stats.prompt_seconds > 0
    assert len(whole.prompt_logprobs) == len(request.prompt) - 1


def test_cached_tokens_are_those_of_the_first_engine(llm):
    prompt = tuple(llm.service.text.encode("The dog ran to the park and sat. " * 20))
    (request,) = llm.service.requests(prompt, SamplingParams(max_tokens=6, ignore_eos=True), "cached")
    llm.engine.state.drop_cache()
    delivered = Delivered(request, llm.service.head_refusal)
    assert run(llm, request, delivered, 2)[0].num_cached == 0
    chunks = run(llm, delivered.rest(), delivered)  # the cache has the prompt now
    assert [chunk.num_cached for chunk in chunks] == [0] * len(chunks)
    assert chunks[-1].completion.stats.cached_tokens == 0


@pytest.mark.parametrize(
    ("params", "resumed", "said"),
    [
        ({"max_tokens": 2}, (5, 6), "leave none to add"),
        ({}, (-1,), "resumed: -1 is not a token id"),
        ({"verify": "ratio", "temperature": 1.0}, (5,), "cannot be combined with verify 'ratio'"),
        ({"verify": "block", "temperature": 1.0}, (5,), "cannot be combined with verify 'block'"),
    ],
)
def test_what_cannot_be_resumed_is_refused(llm, params, resumed, said):
    (request,) = llm.service.requests((1, 2, 3), SamplingParams(**params), "refused")
    with pytest.raises(RequestError, match=said):
        llm.engine.add(replace(request, resumed=resumed))
