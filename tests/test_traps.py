"""The traps that other engines fell into, one test for each, named after the report.

Each drives the behaviour itself, briefly; the files of the parts concerned go deeper. What only a GPU shows is driven
here with the CPU in both places, and its docstring says so.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from headlong import LLM, Completion, HeadlongError, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.convert.quantize import quantize
from headlong.engine.step import host
from headlong.params import Grammar
from headlong.progress import silent
from headlong.speculate.depth import AdaptiveDepths, Wish
from headlong.state.delta_net import DeltaNetState
from headlong.state.paged_kv import PagedKv
from headlong.text.output import ChatFormat, ToolCallArguments, ToolCallStart
from headlong.types import Plan, Request, RowPlan, StepTimes, Verdict
from support import tiny
from support.steps import Driver
from support.steps import load as load_tiny

STORY = (
    "Once upon a time there was a little fox who lived at the edge of a big forest. Every morning she ran to the "
    "river and looked at the water. One day she saw a red boat with a small bear in it. The bear was sad, because he "
    "had lost his hat in the wind. The fox said, I can help you find it."
)


def load(**options: Any) -> LLM:
    own = {"max_rows": 4, "max_context": 512, "cache_tokens": 4096, "page_size": 16, "progress": silent}
    return LLM(**(own | options))


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The embedded model, drafting, with a prefix cache."""
    return load()


@pytest.fixture(scope="module")
def plain() -> LLM:
    """The same without either: what it gives is the truth."""
    return load(mtp="off", prefix_cache=False)


@pytest.fixture(scope="module")
def story(llm) -> list[int]:
    return list(llm.service.text.encode(STORY))


def ask(max_tokens: int, drafts: int, **own: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, draft_tokens=drafts, ignore_eos=True, **own)


def same(found: Completion, truth: Completion) -> bool:
    return (found.token_ids, found.text, found.logprobs) == (truth.token_ids, truth.text, truth.logprobs)


class Seen:
    """Every plan of an engine with its verdict."""

    def __init__(self, monkeypatch, llm: LLM) -> None:
        self.steps: list[tuple[Plan, Verdict]] = []
        verify = host.verify

        def spy(plan, *rest):
            self.steps.append((plan, verify(plan, *rest)))
            return self.steps[-1][1]

        monkeypatch.setattr(host, "verify", spy)
        llm.engine.state.drop_cache()


def test_vllm_55766_a_chunk_of_k_plus_1_is_no_verification(monkeypatch, llm, plain, story):
    """A prompt of K + 1 tokens, read while another row verifies K drafts: the same shape, another thing."""
    drafts = 3
    params = [ask(24, drafts), ask(8, drafts), ask(8, drafts)]
    prompts = [story[:10], story[20 : 21 + drafts], story[40 : 41 + drafts]]
    truth = [plain.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    seen = Seen(monkeypatch, llm)
    first = llm.stream(prompts[0], params[0])
    next(first)
    rest = llm.generate(prompts[1:], params[1:])
    *_, last = first
    assert last.completion is not None and same(last.completion, truth[0])
    assert all(same(found, wanted) for found, wanted in zip(rest, truth[1:], strict=True))
    shapes = [{(row.query_len, row.num_drafts) for row in plan.rows} for plan, _ in seen.steps]
    assert any({(1 + drafts, drafts), (1 + drafts, 0)} <= shape for shape in shapes), "both in one step"


@pytest.mark.parametrize("drafts", [0, 3])
def test_vllm_43559_53912_a_prefix_hit_leaves_the_memories_exact(llm, plain, story, drafts):
    """Second turns on a cached beginning, generated text included; log-probabilities tell of the slightest change in
    a recurrent memory. The hit is as long with drafts as without."""
    llm.engine.state.drop_cache()
    first = llm.generate(story[:50], ask(20, drafts))
    turn = [*story[:50], *first.token_ids, *story[60:70]]
    truth = plain.generate(turn, ask(24, 0, logprobs=2, temperature=0.7, seed=1))
    again = llm.generate(turn, ask(24, drafts, logprobs=2, temperature=0.7, seed=1))
    assert again.stats.cached_tokens == 50 + 19, "all but the last token, which was never fed"
    assert same(again, truth)
    third = llm.generate(turn, ask(24, drafts, logprobs=2, temperature=0.7, seed=1))
    assert third.stats.cached_tokens > 50 and same(third, truth)


def test_vllm_53919_llama_cpp_27572_a_step_starts_from_the_last_ones_verdict(monkeypatch, llm, story):
    """What was accepted is what the next step replays and counts from; counts of all sizes, rows of all kinds. There
    is one verdict at a time: the next plan is made when it was read back and committed, on any device."""
    seen = Seen(monkeypatch, llm)
    llm.generate(
        [story[:20], story[5:9], story[30:60]], [ask(40, 4), ask(30, 2), ask(40, 3, temperature=0.9, seed=2)]
    )
    before: dict[str, tuple[int, int]] = {}
    counts = set()
    for plan, verdict in seen.steps:
        for row, accepted in zip(plan.rows, verdict.accepted, strict=True):
            if row.request.id in before and not row.known_tokens:
                length, replay = before[row.request.id]
                assert (row.start, row.num_replay) == (length, replay)
                counts.add(replay)
            before[row.request.id] = (row.start + row.num_certain + accepted, accepted)
    assert {0, 1, 2} <= counts


def test_llama_cpp_28286_nothing_of_a_row_is_left_in_its_slot(plain, story):
    """One slot, one row after the other, some leaving early; what they leave behind is poisoned for good measure."""
    llm = load(max_rows=1, cache_tokens=512)
    for start in (0, 11, 23):
        for chunk in llm.stream(story[start : start + 30], ask(60, 3)):
            if len(chunk.token_ids) > 1:
                break
        assert not llm.engine.has_work
        llm.engine.state.drop_cache()
        for layer in llm.engine.state.layers.values():
            tensors = [layer.keys, layer.values] if isinstance(layer, PagedKv) else [layer.windows]
            if isinstance(layer, DeltaNetState):
                tensors.extend(vars(layer.delta).values())
            for tensor in tensors:
                tensor.fill_(torch.nan)
        prompt = story[start + 3 : start + 12]
        found = llm.generate(prompt, ask(16, 3, logprobs=1))
        assert same(found, plain.generate(prompt, ask(16, 0, logprobs=1)))


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_vllm_43304_41994_sglang_35797_xinfer_369_packed_target_and_plain_head(tmp_path, llm, story, format):
    """A BF16 head in a packed model is read as what it is, and drafts about as well as beside the original."""
    quantize(Checkpoint.open(EMBEDDED), tmp_path / format, format=format)
    packed = load(model=tmp_path / format, mtp="on")
    whole = llm.generate(story[:40], ask(60, 3)).stats
    found = packed.generate(story[:40], ask(60, 3))
    assert found.stats.tokens_per_step > 1.3 and found.stats.tokens_per_step > 0.7 * whole.tokens_per_step
    assert found.token_ids == packed.generate(story[:40], ask(60, 0)).token_ids


def test_llama_cpp_22673_xinfer_369_a_model_without_a_head_serves_and_says_why(tmp_path):
    folder = tiny.make(tmp_path / "headless", head=False).folder
    llm = load(model=folder)
    assert llm.mtp_refusal is not None and "mtp" in llm.mtp_refusal.lower()
    done = llm.generate([1, 2, 3], SamplingParams(max_tokens=8, draft_tokens=3))
    assert len(done.token_ids) == 8 and not done.stats.mtp and done.stats.mtp.reason == llm.mtp_refusal
    with pytest.raises(HeadlongError, match="mtp='on', but the checkpoint has no MTP head"):
        load(model=folder, mtp="on")


def test_tabbyapi_424_the_head_has_the_lm_head_and_one_device(tmp_path):
    """Drafts are what the head's output says through the target's lm_head, by the reference. Illegal accesses between
    two GPUs cannot happen on one CPU; here everything the head touches is on the engine's own device, whichever that
    is: there is no place for it to be elsewhere."""
    made = tiny.make(tmp_path / "model")
    built = load_tiny(made.folder, "float64")
    driver = Driver(built)
    tokens = tiny.random_tokens(made.vocab_size, 30, seed=4)
    driver.open("row", tokens)
    driver.feed("row", [24])
    reference = made.double()
    hidden, _ = reference.forward(tokens[:24])
    out = reference.pairs(tokens[1:25], hidden)
    assert driver.propose("row", 1) == [int(reference.model.lm_head(out[-1]).argmax())]
    state, device = driver.state, built.ops.device
    held = [state.carry_SD, state.last_token_S]
    for layer in state.layers.values():
        held.extend([layer.keys, layer.values] if isinstance(layer, PagedKv) else vars(layer.delta).values())
    assert built.head is not None and {tensor.device for tensor in held} == {device}
    assert set(built.head.state_specs) <= state.layers.keys()


@pytest.mark.parametrize("drafts", [1, 2, 5, 8])
def test_omlx_3324_llama_cpp_25618_greedy_text_is_the_same_with_drafts(llm, plain, story, drafts):
    for prompt in (story[:3], story[20:60]):
        found = llm.generate(prompt, ask(48, drafts))
        assert same(found, plain.generate(prompt, ask(48, 0)))
        assert found.stats.accepted > 0


def test_omlx_3370_drafts_are_accepted_at_any_temperature(llm, plain, story):
    for temperature in (0.3, 0.8, 1.0):
        own = {"temperature": temperature, "seed": 3}
        found = llm.generate(story[:30], ask(48, 2, **own))
        assert found.stats.accepted > 0.25 * found.stats.drafted
        assert same(found, plain.generate(story[:30], ask(48, 0, **own)))


def test_exo_2110_penalties_count_at_every_draft(llm, plain, story):
    own = {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    truth = plain.generate(story[:30], ask(48, 0, **own))
    assert truth.token_ids != plain.generate(story[:30], ask(48, 0)).token_ids, "they make a difference"
    found = llm.generate(story[:30], ask(48, 4, **own))
    assert same(found, truth) and found.stats.accepted > 0


def test_llama_cpp_27972_logprobs_are_the_emitted_tokens_own(llm, plain, story):
    found = llm.generate(story[:30], ask(40, 4, logprobs=3, temperature=0.6, seed=8))
    assert found.logprobs is not None and [entry.token_id for entry in found.logprobs] == list(
        found.token_ids
    )
    assert found.stats.accepted > 5
    truth = plain.generate(story[:30], ask(40, 0, logprobs=3, temperature=0.6, seed=8))
    assert found.logprobs == truth.logprobs
    assert all(entry.top == tuple(sorted(entry.top, key=lambda pair: -pair[1])) for entry in found.logprobs)


def test_vllm_46118_the_grammar_begins_inside_accepted_drafts(llm, plain, story):
    """The marker that ends the free part comes as an accepted draft; what follows in the same step obeys already."""
    assert llm.service.text.tokenizer is not None
    tokenizer, marker, before = llm.service.text.tokenizer, None, ""
    for chunk in llm.stream(story[:6], ask(80, 8)):
        words = [tokenizer.token_text(token) for token in chunk.token_ids]
        for place, word in enumerate(words):
            inside = 0 < place < chunk.num_accepted - 2
            if marker is None and inside and len(before) > 20 and word.strip() and word not in before:
                marker = word
            before += word
    assert marker is not None, "the model accepts no run of drafts here"
    grammar = Grammar("choice", '[" yes, it is", " no, never"]', after=marker)
    truth = plain.generate(story[:6], SamplingParams(max_tokens=80, grammar=grammar))
    inside = 0
    for drafts in (1, 4, 8):
        params = SamplingParams(max_tokens=80, grammar=grammar, draft_tokens=drafts)
        for chunk in llm.stream(story[:6], params):
            words = [tokenizer.token_text(token) for token in chunk.token_ids]
            inside += marker in words[: chunk.num_accepted]
        assert chunk.completion is not None and same(chunk.completion, truth)
    assert inside, "the marker was an accepted draft"
    free, _, answer = truth.text.partition(marker)
    assert free and answer in (" yes, it is", " no, never") and truth.finish_reason == "stop"


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder"])
def test_vllm_35800_tool_calls_survive_runs_of_tokens(format):
    """Accepted drafts bring several tokens at once, so that markers and JSON come in pieces of any size."""
    arguments = {"city": "Zürich </b>", "days": 3}
    texts = {
        "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(arguments)}}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nZürich </b>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    }
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    function = {"name": "weather", "parameters": {"type": "object", "properties": properties}}
    text, rng = f"Let me see.\n{texts[format]}", random.Random(1)
    for longest in (1, 2, 3, 9, 40, 1000):
        parser = ChatFormat.detect(None, tools=format).parser(
            "", [{"type": "function", "function": function}]
        )
        events, place = [], 0
        while place < len(text):
            count = rng.randint(1, longest)
            events += parser.push(text[place : place + count])
            place += count
        events += parser.finish()
        names = [event.name for event in events if isinstance(event, ToolCallStart)]
        written = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
        assert names == ["weather"] and json.loads(written) == arguments


def test_exo_2110_a_prompt_is_read_once_by_target_and_head(monkeypatch, llm, story):
    """Priming the head takes no second pass of the target, and no second one of the head."""
    seen = Seen(monkeypatch, llm)
    reads: dict[str, int] = {"target": 0, "head": 0}
    proposer: Any = llm.engine.proposer

    def counting(who: str, real: Callable[..., Any], which: int) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            reads[who] += len(args[which])
            return real(*args)

        return count

    monkeypatch.setattr(llm.engine.model, "forward", counting("target", llm.engine.model.forward, 0))
    for name in ("forward", "remember"):
        monkeypatch.setattr(proposer.head, name, counting("head", getattr(proposer.head, name), 0))
    llm.generate(story[:70], ask(1, 3))
    fed = sum(plan.num_tokens for plan, _ in seen.steps)
    assert fed == reads["target"] == 70
    assert 0 < reads["head"] <= 70


def simulate(
    depths: AdaptiveDepths,
    rows: int,
    rate: float,
    seconds: Callable[[int, int], tuple[float, float]],
    steps: int,
) -> list[list[int]]:
    """The depths chosen for rows whose drafts stand at `rate`, on a machine on which drafting and verifying so many
    drafts of so many rows takes these seconds."""
    rng, chosen = random.Random(5), []
    requests = [
        Request(str(n), (1,), SamplingParams(), 0, draft_tokens=8, adaptive=True) for n in range(rows)
    ]
    for _ in range(steps):
        picked = depths.choose({request.id: Wish(8, True) for request in requests}, 0)
        chosen.append(list(picked.values()))
        accepted = tuple(_run(rng, rate, picked[request.id]) for request in requests)
        plans = tuple(_decoding(request, picked[request.id]) for request in requests)
        plan = Plan(plans, max(picked.values()))
        none: tuple[tuple[()], ...] = tuple(() for _ in requests)
        verdict = Verdict(torch.zeros(0), accepted, none, none, none)
        draft, verify = seconds(plan.num_drafts, sum(picked.values()))
        depths.observe(
            plan, verdict, StepTimes(draft * rng.uniform(0.95, 1.05), verify * rng.uniform(0.95, 1.05))
        )
    return chosen


def _run(rng: random.Random, rate: float, depth: int) -> int:
    return next((n for n in range(depth) if rng.random() >= rate), depth)


def _decoding(request: Request, depth: int) -> RowPlan:
    return RowPlan(request, 1, 10, 1 + depth, depth, 0, (1,), True, 5, ())


def mean(values: Sequence[Sequence[int]]) -> float:
    return sum(map(sum, values)) / sum(map(len, values))


def test_vllm_39680_omlx_2150_where_drafts_do_not_pay_there_are_none():
    """A small model: a draft costs a good part of a step, and every token to verify its share (as with experts)."""
    for rate in (0.05, 0.5):
        chosen = simulate(AdaptiveDepths(8), 1, rate, lambda depth, n: (0.9 * depth, 1.0 + 0.4 * n), 400)
        assert mean(chosen[100:]) < 0.1


def test_vllm_49548_depth_does_not_collapse_under_concurrency():
    """Sixteen rows whose drafts stand, on a machine where they pay: all of them draft, also after the number of rows
    has changed, and as deep as one row alone."""
    depths = AdaptiveDepths(8)

    def seconds(depth: int, drafts: int) -> tuple[float, float]:
        return 0.05 * depth, 1.0 + 0.004 * drafts

    alone = simulate(depths, 1, 0.85, seconds, 150)
    many = simulate(depths, 16, 0.85, seconds, 200)
    assert mean(alone[80:]) > 3
    assert mean(many[80:]) > 0.6 * mean(alone[80:])
    assert sum(depth == 0 for step in many[80:] for depth in step) < 0.1 * 16 * len(many[80:])
