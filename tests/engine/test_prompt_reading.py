"""Log-probabilities and hidden states of prompts: the same bits however a prompt is read, and those of decoding."""

import pytest
import torch
from engine_cases import drive

from headlong import LLM, SamplingParams
from headlong.engine.scheduler import TOLD_PRICE

PROMPTS = [tuple(300 + (7 * row + 11 * place) % 900 for place in range(90 + 60 * row)) for row in range(4)]
ASKED = SamplingParams(max_tokens=12, prompt_logprobs=3, pooling="mean", ignore_eos=True)


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def read(request):
    """One prompt after the other, in one piece, with nothing cached and nothing drafted."""
    llm = LLM(dtype=request.param, draft_tokens=0, prefix_cache=False, chunk_tokens=4096, page_size=16)
    return request.param, [llm.generate(prompt, ASKED) for prompt in PROMPTS]


OTHERWISE = [{"chunk_tokens": 48}, {"chunk_tokens": 512, "max_rows": 4}]


@pytest.mark.parametrize("options", OTHERWISE, ids=["chunks", "together"])
def test_the_same_bits(read, options):
    """In chunks, beside other rows, and where all of it is cached."""
    dtype, alone = read
    llm = LLM(dtype=dtype, draft_tokens=3, page_size=16, **options)
    for _ in range(2):
        for one, other in zip(alone, llm.generate(PROMPTS, ASKED), strict=True):
            assert other.token_ids == one.token_ids
            assert other.prompt_logprobs == one.prompt_logprobs
            assert other.embedding == one.embedding
            assert other.stats.cached_tokens == 0


def test_put_back_while_it_reads(read):
    """A row that grows takes the pages of one that has read half of its prompt, which then begins again."""
    dtype, alone = read
    llm = LLM(dtype=dtype, draft_tokens=3, page_size=16, chunk_tokens=16, cache_tokens=256, max_context=None)
    grows = llm.service.requests(PROMPTS[0][:30], SamplingParams(max_tokens=40, ignore_eos=True), "grows")
    reads = llm.service.requests(PROMPTS[2][:200], ASKED, "reads")
    trace = drive(llm, [*grows, *reads])
    read_in = [
        row for plan in trace.plans for row in plan.rows if row.request is reads[0] and row.known_tokens
    ]
    assert max(row.query_len for row in read_in) * TOLD_PRICE <= 16, "others wait for these as for many"
    started = [row.start for plan in trace.plans for row in plan.rows if row.request is reads[0]]
    assert trace.preempted == ["reads.0"] and started.count(0) == 2 and started[1] > 0
    (output,) = (one for one in trace.outputs if one.prompt_logprobs is not None)
    assert output.prompt_logprobs == alone[2].prompt_logprobs[:199]


def test_those_of_decoding(read):
    dtype, alone = read
    llm = LLM(dtype=dtype, draft_tokens=3, page_size=16)
    written = llm.generate(
        PROMPTS[0], SamplingParams(max_tokens=40, logprobs=2, ignore_eos=True, temperature=1.0, seed=3)
    )
    prompt = (*PROMPTS[0], *written.token_ids)
    found = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=2)).prompt_logprobs
    assert len(found) == len(prompt) - 1
    assert [one.logprobs for one in found[-40:]] == list(written.logprobs)
    assert [one.logprobs for one in found[: len(PROMPTS[0]) - 1]] == [
        type(one.logprobs)(one.logprobs.token_id, one.logprobs.logprob, one.logprobs.top[:2])
        for one in alone[0].prompt_logprobs
    ]
    assert all((one.rank == 1) == (one.logprobs.top[0][0] == one.logprobs.token_id) for one in found)


def test_others_read_nothing(read):
    """Rows that do not ask are none the wiser, and take what is cached."""
    dtype, _ = read
    llm = LLM(dtype=dtype, draft_tokens=3, page_size=16)
    plain = SamplingParams(max_tokens=4)
    first, again = llm.generate(PROMPTS[1], plain), llm.generate(PROMPTS[1], plain)
    assert again.stats.cached_tokens > 0 and first.token_ids == again.token_ids
    assert first.prompt_logprobs is None and first.embedding is None


def test_last_is_the_last_one():
    llm = LLM(dtype="float32")
    last = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, pooling="last")).embedding
    whole = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, pooling="mean")).embedding
    before = llm.generate(PROMPTS[0][:-1], SamplingParams(max_tokens=1, pooling="mean")).embedding
    count = len(PROMPTS[0])
    rest = torch.tensor(whole) * count - torch.tensor(before) * (count - 1)
    assert torch.allclose(rest, torch.tensor(last), atol=1e-3)
