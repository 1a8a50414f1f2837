"""The synchronous front end: shapes of arguments and answers, refusals that name the field, honest statistics."""

import itertools
import math

import pytest
import torch
from engine_cases import STORY, assert_all_free, load, quiet

from headlong import (
    LLM,
    Completion,
    ConfigError,
    HeadlongError,
    RequestError,
    SamplingParams,
)
from headlong.env import available_cores
from headlong.ops import native

SHORT = SamplingParams(max_tokens=8)
HELLO = [{"role": "user", "content": "Hello!"}]


def same(a: Completion, b: Completion) -> bool:
    return (a.text, a.token_ids, a.finish_reason, a.logprobs) == (
        b.text,
        b.token_ids,
        b.finish_reason,
        b.logprobs,
    )


class TestShapes:
    def test_one_in_one_out(self, llm):
        done = llm.generate("Once upon a time", SHORT)
        assert isinstance(done, Completion)
        assert len(done.token_ids) == 8 and done.text and done.logprobs is None
        assert done.choices == (done,)
        assert llm.service.text.tokenizer.decode(list(done.token_ids)) == done.text

    def test_list_in_list_out(self, llm):
        texts = ["Once upon a time", "The dog", "A"]
        done = llm.generate(texts, SHORT)
        assert [same(c, llm.generate(t, SHORT)) for c, t in zip(done, texts, strict=True)] == [True] * 3
        assert len(llm.generate(texts[:1], SHORT)) == 1
        assert llm.generate([], SHORT) == []

    def test_token_ids(self, llm):
        ids = llm.service.text.encode("Once upon a time")
        text = llm.generate("Once upon a time", SHORT)
        assert same(llm.generate(list(ids), SHORT), text)
        assert same(llm.generate(ids, SHORT), text)
        mixed = llm.generate([list(ids), "Once upon a time", ids], SHORT)
        assert all(same(one, text) for one in mixed)

    def test_params_for_each(self, llm):
        params = [SamplingParams(max_tokens=n) for n in (1, 5, 3)]
        done = llm.generate(["The dog"] * 3, params)
        assert [len(c.token_ids) for c in done] == [1, 5, 3]
        assert llm.generate("The dog").finish_reason in ("stop", "length")

    def test_params_of_the_wrong_number(self, llm):
        with pytest.raises(RequestError, match="params has 2 entries for 3 prompts"):
            llm.generate(["a", "b", "c"], [SHORT, SHORT])
        with pytest.raises(RequestError, match="params is a list"):
            llm.generate("a", [SHORT])

    def test_chat(self, llm):
        one = llm.chat(HELLO, SHORT)
        assert isinstance(one, Completion)
        two = llm.chat([HELLO, HELLO], SHORT)
        assert len(two) == 2 and all(same(c, one) for c in two)
        assert same(llm.generate(list(llm.service.text.encode_chat(HELLO)), SHORT), one)

    @pytest.mark.parametrize("messages", [[], [{}], [{"role": "user"}], [{"content": "x"}]])
    def test_bad_messages(self, llm, messages):
        with pytest.raises(RequestError, match="messages"):
            llm.chat(messages, SHORT)

    @pytest.mark.parametrize("prompt", [5, None, 1.5, [1.5], [None], object()])
    def test_what_is_no_prompt(self, llm, prompt):
        with pytest.raises(RequestError, match="prompt"):
            llm.generate(prompt, SHORT)
        assert_all_free(llm)


class TestStream:
    @pytest.mark.parametrize("temperature", [0.0, 0.9])
    def test_equals_generate(self, llm, temperature):
        params = SamplingParams(
            max_tokens=30, temperature=temperature, seed=3, logprobs=1, n=2, draft_tokens=3
        )
        whole = llm.generate("Once upon a time", params)
        chunks = list(llm.stream("Once upon a time", params))
        for choice in whole.choices:
            own = [chunk for chunk in chunks if chunk.index == choice.index]
            assert "".join(chunk.text for chunk in own) == choice.text
            assert tuple(itertools.chain.from_iterable(c.token_ids for c in own)) == choice.token_ids
            assert tuple(itertools.chain.from_iterable(c.logprobs for c in own)) == choice.logprobs
            assert all(len(chunk.from_draft) == len(chunk.token_ids) for chunk in own)
            assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].completion is not None and same(own[-1].completion, choice)
        assert any(any(chunk.from_draft) for chunk in chunks)

    def test_takes_conversations_and_token_ids(self, llm):
        text = "".join(chunk.text for chunk in llm.stream(HELLO, SHORT))
        assert text == llm.chat(HELLO, SHORT).text
        ids = list(llm.service.text.encode("The dog"))
        assert "".join(c.text for c in llm.stream(ids, SHORT)) == llm.generate("The dog", SHORT).text

    def test_closed_early(self, llm):
        stream = llm.stream("Once upon a time", SamplingParams(max_tokens=200, n=2, seed=1))
        next(stream)
        assert llm.engine.has_work
        stream.close()
        assert_all_free(llm)

    def test_closed_before_it_began(self, llm):
        stream = llm.stream("Once upon a time", SHORT)
        stream.close()
        assert_all_free(llm)

    def test_left_by_an_exception(self, llm):
        with pytest.raises(ZeroDivisionError):
            for _ in llm.stream("Once upon a time", SHORT):
                raise ZeroDivisionError
        assert_all_free(llm)

    def test_errors_come_at_the_call(self, llm):
        with pytest.raises(RequestError, match="prompt is empty"):
            llm.stream("", SHORT)

    def test_two_streams_at_once(self, llm):
        texts = ("Once upon a time", "The dog ran")
        params = SamplingParams(max_tokens=16)
        found = ["", ""]
        for pair in itertools.zip_longest(*(llm.stream(text, params) for text in texts)):
            for number, chunk in enumerate(pair):
                found[number] += chunk.text if chunk else ""
        assert found == [llm.generate(text, params).text for text in texts]
        assert_all_free(llm)

    def test_generate_while_a_stream_is_open(self, llm):
        stream = llm.stream("Once upon a time", SHORT)
        first = next(stream)
        other = llm.generate("The dog ran", SamplingParams(max_tokens=20))
        text = first.text + "".join(chunk.text for chunk in stream)
        assert text == llm.generate("Once upon a time", SHORT).text
        assert same(other, llm.generate("The dog ran", SamplingParams(max_tokens=20)))


class TestSeeds:
    def test_given_seed_repeats(self, llm):
        params = SamplingParams(max_tokens=16, temperature=1.0, seed=11)
        assert same(llm.generate("The", params), llm.generate("The", params))
        other = SamplingParams(max_tokens=16, temperature=1.0, seed=12)
        assert not same(llm.generate("The", params), llm.generate("The", other))

    def test_no_seed_differs(self, llm):
        params = SamplingParams(max_tokens=24, temperature=1.2)
        texts = {llm.generate("The", params).text for _ in range(3)}
        texts |= {c.text for c in llm.generate(["The"] * 3, params)}
        assert len(texts) == 6

    def test_largest_seed(self, llm):
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=2**63 - 1)
        assert same(llm.generate("The", params), llm.generate("The", params))

    def test_choices(self, llm):
        params = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
        one = llm.generate("The dog", SamplingParams(**params))
        three = llm.generate("The dog", SamplingParams(**params, n=3))
        assert same(three.choices[0], one)
        assert [c.index for c in three.choices] == [0, 1, 2]
        assert len({c.text for c in three.choices}) == 3
        greedy = llm.generate("The dog", SamplingParams(max_tokens=12, n=2))
        assert greedy.choices[0].text == greedy.choices[1].text


def range_list(stop, but=()):
    return [i for i in range(stop) if i not in but]


BAD_OPTIONS = {
    "mtp": ["yes", True, None],
    "draft_tokens": [-1, 9, "three", 1.0, True, None],
    "device": ["tpu!", "gpu", 3.5],
    "dtype": ["int8", "fp33", None],
    "max_rows": [0, -1, 1.0, "4", True, 5000],
    "max_context": [0, -5, 1.5, "x"],
    "cache_tokens": [0, -5, 1.5, "x"],
    "gpu_memory_fraction": [0, 0.0, -0.5, 1.01, math.nan, "0.9", True, None],
    "page_size": [0, 8, 2048, 1.0],
    "chunk_tokens": [0, -1, 1.0],
    "max_draft_tokens": [0, 17, 1.0, True],
}


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "value"), [(name, value) for name, values in BAD_OPTIONS.items() for value in values]
    )
    def test_wrong_options_name_themselves(self, name, value):
        with pytest.raises(ConfigError, match=name):
            LLM(**{name: value}, progress=quiet)

    def test_unknown_option(self):
        with pytest.raises(TypeError, match="max_seqs"):
            LLM(max_seqs=3, progress=quiet)

    def test_context_beyond_the_cache(self):
        with pytest.raises(ConfigError, match="max_context 512 does not fit in cache_tokens 128"):
            LLM(max_context=512, cache_tokens=128, progress=quiet)

    def test_missing_model(self, tmp_path):
        with pytest.raises(HeadlongError, match="nowhere"):
            LLM(tmp_path / "nowhere", progress=quiet)


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "params", "message"),
        [
            ("", {}, "prompt is empty"),
            ([], None, None),
            ([8192], {}, "prompt: 8192 is not a token id"),
            ([5, -1], {}, "prompt: -1 is not a token id"),
            ([5, True], {}, "prompt: True is not a token id"),
            ("a", {"bad_token_ids": [8192]}, "bad_token_ids: 8192"),
            ("a", {"stop_token_ids": [-1]}, "stop_token_ids: -1"),
            ("a", {"logit_bias": {9000: 1.0}}, "logit_bias: 9000"),
            ("a", {"bad_token_ids": range_list(8192)}, "leave no token to choose from"),
            (
                "a",
                {"bad_token_ids": range_list(8192, but=(0, 2)), "min_tokens": 2},
                "leave no token to choose from",
            ),
            ("a", {"draft_tokens": 9}, "draft_tokens 9 is above this engine's maximum of 8"),
            (list(range(10)) * 103, {}, "prompt has 1030 tokens; this engine's context is 1024"),
            (list(range(8)) * 128, {}, "prompt has 1024 tokens"),
        ],
    )
    def test_requests(self, llm, prompt, params, message):
        if message is None:
            assert llm.generate(prompt) == []
            return
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, SamplingParams(**params))
        # One bad prompt among good ones runs nothing and leaves nothing.
        with pytest.raises(RequestError, match=message):
            llm.generate(["The dog", prompt], SamplingParams(**params))
        assert_all_free(llm)


class TestEnds:
    def test_length(self, llm):
        done = llm.generate("Once upon a time", SHORT)
        assert (done.finish_reason, done.stop_reason) == ("length", None)

    def test_stop_token(self, llm):
        free = llm.generate("Once upon a time", SamplingParams(max_tokens=20))
        token = free.token_ids[7]
        done = llm.generate("Once upon a time", SamplingParams(max_tokens=20, stop_token_ids=[token]))
        assert (done.finish_reason, done.stop_reason) == ("stop", token)
        first = free.token_ids.index(token)
        assert done.token_ids == free.token_ids[: first + 1], "the stop token is among the ids"
        assert done.text == llm.service.text.tokenizer.decode(list(done.token_ids[:-1])), (
            "and not in the text"
        )

    def test_stop_string_is_not_in_the_text(self, llm):
        free = llm.generate("Once upon a time", SamplingParams(max_tokens=40))
        stop = free.text[20:26]
        done = llm.generate("Once upon a time", SamplingParams(max_tokens=40, stop=["@@", stop]))
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert done.text == free.text[: free.text.index(stop)] and stop not in done.text
        assert done.token_ids == free.token_ids[: len(done.token_ids)]

    def test_min_tokens_and_stop_string(self, llm):
        free = llm.generate("Once upon a time", SamplingParams(max_tokens=40))
        params = SamplingParams(max_tokens=40, stop=[" "], min_tokens=12)
        done = llm.generate("Once upon a time", params)
        assert 12 <= len(done.token_ids) < 40 and done.stop_reason == " "
        assert free.text.startswith(done.text) and " " in done.text

    def test_min_tokens_and_end_of_sequence(self, llm):
        eos = min(llm.service.eos_ids)
        params = {"max_tokens": 20, "logit_bias": {eos: 50.0}}
        assert len(llm.generate("The", SamplingParams(**params)).token_ids) == 1
        held = llm.generate("The", SamplingParams(**params, min_tokens=6))
        assert len(held.token_ids) == 7 and held.stop_reason == eos
        ignored = llm.generate("The", SamplingParams(**params, ignore_eos=True))
        assert (ignored.finish_reason, ignored.token_ids) == ("length", (eos,) * 20)

    def test_end_of_context(self):
        small = load("auto", max_context=40, cache_tokens=64)
        for depth in (0, 3, 8):
            params = SamplingParams(max_tokens=500, ignore_eos=True, draft_tokens=depth)
            done = small.generate(list(range(10, 41)), params)
            assert done.finish_reason == "length" and len(done.token_ids) == 9
            assert len(small.generate(list(range(10, 49)), params).token_ids) == 1
        with pytest.raises(RequestError, match="prompt has 40 tokens"):
            small.generate(list(range(40)))

    def test_banned(self, llm):
        free = llm.generate("Once upon a time", SamplingParams(max_tokens=20))
        banned = tuple(set(free.token_ids))
        done = llm.generate("Once upon a time", SamplingParams(max_tokens=20, bad_token_ids=banned))
        assert not set(done.token_ids) & set(banned)


class TestLogprobs:
    def test_content(self, llm):
        params = SamplingParams(max_tokens=16, temperature=1.2, seed=4, logprobs=5)
        done = llm.generate("Once upon a time", params)
        assert done.logprobs is not None and [e.token_id for e in done.logprobs] == list(done.token_ids)
        for entry in done.logprobs:
            values = [value for _, value in entry.top]
            assert len(values) == 5 and values == sorted(values, reverse=True)
            assert len({token for token, _ in entry.top}) == 5
            assert entry.logprob <= 0.0 and sum(math.exp(v) for v in values) <= 1.0 + 1e-6
            if entry.logprob > values[-1]:
                assert (entry.token_id, entry.logprob) in entry.top

    def test_greedy_chooses_the_best(self, llm):
        done = llm.generate("Once upon a time", SamplingParams(max_tokens=16, logprobs=1))
        assert all(entry.logprob == entry.top[0][1] for entry in done.logprobs or ())

    def test_zero_and_none(self, llm):
        zero = llm.generate("The", SamplingParams(max_tokens=4, logprobs=0))
        assert zero.logprobs is not None and all(e.top == () for e in zero.logprobs)
        assert llm.generate("The", SHORT).logprobs is None

    def test_the_models_own(self, llm):
        """Not touched by temperature, bias or penalties."""
        token = llm.generate("The", SamplingParams(max_tokens=1)).token_ids[0]
        asked = {"max_tokens": 1, "logprobs": 3}
        plain = llm.generate("The", SamplingParams(**asked))
        bent = llm.generate("The", SamplingParams(**asked, logit_bias={token: 30.0}, temperature=0.1, seed=0))
        assert plain.logprobs == bent.logprobs


class TestStats:
    @pytest.mark.parametrize("depth", [1, 3, 8])
    def test_add_up(self, llm, depth):
        params = SamplingParams(max_tokens=41, ignore_eos=True, draft_tokens=depth)
        stats = llm.generate("Once upon a time", params).stats
        assert stats.mtp and stats.mtp.reason is None
        assert 0 < stats.accepted <= stats.drafted
        # Every step gives its accepted drafts and one token more; the prompt's step gave the first.
        assert stats.steps + stats.accepted == 40
        assert stats.tokens_per_step == pytest.approx(40 / stats.steps) and stats.tokens_per_step > 1.2
        assert len(stats.acceptance_per_position) == depth
        assert all(0.0 <= share <= 1.0 for share in stats.acceptance_per_position)
        assert stats.prompt_tokens == len(llm.service.text.encode("Once upon a time"))
        assert stats.prompt_seconds > 0 and stats.decode_seconds > 0
        assert stats.tokens_per_second == pytest.approx(40 / stats.decode_seconds)

    def test_request_without_drafts(self, llm):
        stats = llm.generate("The", SamplingParams(max_tokens=9, draft_tokens=0, ignore_eos=True)).stats
        assert not stats.mtp and stats.mtp.reason == "draft_tokens is 0 for this request"
        assert (stats.drafted, stats.accepted, stats.acceptance_per_position) == (0, 0, ())
        assert (stats.steps, stats.tokens_per_step) == (8, 1.0)

    def test_too_short_for_drafts(self, llm):
        stats = llm.generate("The", SamplingParams(max_tokens=1)).stats
        assert not stats.mtp and "ended before" in (stats.mtp.reason or "")
        assert (stats.steps, stats.tokens_per_step) == (0, 0.0)

    def test_engines_without_drafts(self, llm):
        off, zero = load("auto", mtp="off"), load("auto", draft_tokens=0)
        params = SamplingParams(max_tokens=10)
        truth = llm.generate("The dog", params)
        for engine, reason in ((off, "mtp='off'"), (zero, "draft_tokens 0")):
            done = engine.generate("The dog", params)
            assert same(done, truth)
            assert not done.stats.mtp and reason in (done.stats.mtp.reason or "")
        assert off.mtp_refusal is not None and zero.mtp_refusal is None
        # An engine that does not draft by itself still does so for who asks.
        assert zero.generate("The dog", SamplingParams(max_tokens=10, draft_tokens=2)).stats.mtp
        assert not off.generate("The dog", SamplingParams(max_tokens=10, draft_tokens=2)).stats.mtp

    def test_default_depth(self):
        two = load("auto", draft_tokens=2)
        stats = two.generate("The dog", SamplingParams(max_tokens=12, ignore_eos=True)).stats
        assert len(stats.acceptance_per_position) == 2


@pytest.mark.skipif(native.library() is None, reason="nothing native to give threads to")
def test_weights_are_laid_out_by_all_threads_and_torch_keeps_to_one():
    """Its own would look for work on the cores that are laying out, for a long moment after each of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, available_cores()))
    given = torch.get_num_threads()
    seen = set()

    def look(label: str, *_: object) -> None:
        if label == "load weights":
            seen.add((torch.get_num_threads(), native.num_threads()))

    try:
        LLM(progress=look, cache_tokens=4096, device="cpu")
        assert seen == {(1, given)} and torch.get_num_threads() == given
    finally:
        torch.set_num_threads(before)


def test_progress():
    seen: list[tuple[str, int, int]] = []
    llm = LLM(progress=lambda *report: seen.append(report), chunk_tokens=32, cache_tokens=4096)
    loading = {label for label, _, _ in seen}
    assert loading and all(any(done == total for name, done, total in seen if name == x) for x in loading)
    seen.clear()
    prompt = llm.service.text.encode(STORY)
    llm.generate(list(prompt), SHORT)
    assert {label for label, _, _ in seen} == {"read prompt"}
    done = [count for _, count, _ in seen]
    assert done == sorted(done) and len(done) == -(-len(prompt) // 32)
    assert done[-1] == len(prompt) and {total for _, _, total in seen} == {len(prompt)}


def test_steps_that_were_recorded_on_the_way_teach_no_costs(monkeypatch):
    """Nor what drafts are worth: on a GPU the first steps of a shape take far longer than the others."""
    llm = LLM(progress=quiet)
    honest, seen = llm.engine.runner.forward, []
    usual = iter([True, False, False, True, True, True, True, True])

    def forward(batch, context):
        found = honest(batch, context)
        llm.engine.runner.is_usual = next(usual)
        return found

    monkeypatch.setattr(llm.engine.runner, "forward", forward)
    monkeypatch.setattr(llm.engine.depths, "observe", lambda plan, _verdict, _times: seen.append(plan))
    llm.generate(["Once"], SamplingParams(max_tokens=8, ignore_eos=True, draft_tokens=0))
    assert len(seen) == 6
