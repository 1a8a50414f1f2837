"""The engine on a GPU: same tokens with and without drafting.

In float64, by the reference ops, those of the CPU too: rounding cannot flip a near-tie, so any difference is a bug in
the logic or in a device copy. In bfloat16 by Triton's kernels, whose bits do not depend on a token's company.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headlong import LLM, SamplingParams
from headlong.engine.step.device_stepper import DeviceStepper
from headlong.engine.step.host import HostStepper
from headlong.ops.cuda_graphs import CudaGraphs
from headlong.ops.linear import triton_weight
from headlong.params import Grammar
from headlong.speculate.remote_head import RemoteHead
from headlong.state.paged_kv import PagedKv
from support import tiny
from support.tiny import random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = (
    "Explain rain to a child.",
    "Write a short story about a kite.",
    "Give me three tips for sleeping better.",
)


STORY = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "pages": {"type": "integer"}, "text": {"type": "string"}},
    "required": ["title", "pages", "text"],
}
MIXED = (
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.8, seed=7, top_p=0.9),
    SamplingParams(max_tokens=40, repetition_penalty=1.2, logprobs=2),
)
GREEDY = (SamplingParams(max_tokens=80), SamplingParams(max_tokens=50), SamplingParams(max_tokens=20))
SAMPLED = tuple(
    SamplingParams(max_tokens=60, temperature=0.8, seed=seed, top_p=0.9, top_k=50) for seed in (1, 2, 3)
)
BOTH = (GREEDY[0], SAMPLED[0], GREEDY[2])
PENALISED = (
    SamplingParams(max_tokens=80, presence_penalty=1.5),
    SamplingParams(max_tokens=50, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={40: 2.0}),
    SamplingParams(max_tokens=20, bad_token_ids=(13, 14)),
)
PENALISED_AND_SAMPLED = (
    replace(PENALISED[0], temperature=0.8, seed=5, top_k=20, top_p=0.95),
    replace(PENALISED[1], temperature=0.7, seed=6, top_p=0.9),
    SAMPLED[0],
)
HELD = (
    SamplingParams(max_tokens=60, grammar=Grammar("json_schema", json.dumps(STORY))),
    SamplingParams(
        max_tokens=60,
        grammar=Grammar("regex", "([A-Z][a-z ,]+[.] )+[a-z]+"),
        temperature=0.8,
        seed=4,
        top_k=40,
    ),
    PENALISED[0],
)

TOLD = (
    SamplingParams(max_tokens=40, logprobs=5),
    SamplingParams(max_tokens=60, temperature=0.8, seed=3, top_p=0.9, logprobs=0),
    SamplingParams(max_tokens=200, min_tokens=190),
)


def completions(
    device: str,
    draft_tokens: int | None,
    dtype: str = "float64",
    params: tuple[SamplingParams, ...] = MIXED,
    **options: Any,
) -> list[tuple[int, ...]]:
    return complete(LLM(device=device, dtype=dtype, mtp="on", **options), draft_tokens, params)


def complete(
    llm: LLM, draft_tokens: int | None, params: tuple[SamplingParams, ...] = MIXED
) -> list[tuple[int, ...]]:
    asked = [replace(each, draft_tokens=draft_tokens) for each in params]
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    llm.chat(chats, asked)  # shapes are recorded when they come again
    done = llm.chat(chats, asked)
    llm.engine.check_integrity()
    assert not llm.engine.faults.count
    return [completion.token_ids for completion in done]


def test_cuda_gives_the_tokens_of_the_cpu_at_every_depth() -> None:
    expected = completions("cpu", 0)
    for draft_tokens in (0, 1, 3, 8):
        assert completions("cuda", draft_tokens) == expected, f"K={draft_tokens}"


def test_sums_in_pieces_give_the_same_tokens_at_every_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """As larger models leave them, and with them their norms in half; the embedded model's would be whole."""
    monkeypatch.setattr(triton_weight, "LEAST_STEPS", 1)
    monkeypatch.setattr(triton_weight, "WHOLE_STEPS", 0)
    expected = completions("cuda", 0, "bfloat16", BOTH)
    for draft_tokens in (1, 3, 8):
        assert completions("cuda", draft_tokens, "bfloat16", BOTH) == expected, f"K={draft_tokens}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_give_the_same_tokens_at_every_depth(dtype: str) -> None:
    expected = completions("cuda", 0, dtype)
    for draft_tokens in (1, 3, 8):
        assert completions("cuda", draft_tokens, dtype) == expected, f"K={draft_tokens}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [{}, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}], ids=["small", "wide"])
def test_latents_give_the_same_tokens_at_every_depth(
    dtype: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    tiny.make(tmp_path, "deepseek_v3", seed=8, vocab_size=6, **sizes)
    llm = LLM(tmp_path, device="cuda", dtype=dtype, mtp="on", max_context=512, cache_tokens=4096)
    assert llm.engine.model.capturable
    prompts = [random_tokens(6, 3 + 70 * number, seed=number) for number in range(4)]
    found = []
    for draft_tokens in (0, 0, 1, 3, 3):
        asked = [
            SamplingParams(max_tokens=60, temperature=0.8 * (n % 2), seed=n, draft_tokens=draft_tokens)
            for n in range(4)
        ]
        found.append([completion.token_ids for completion in llm.generate(prompts, asked)])
        llm.engine.check_integrity()
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize(
    "params",
    [GREEDY, SAMPLED, BOTH, PENALISED, PENALISED_AND_SAMPLED],
    ids=["greedy", "sampled", "both", "penalised", "penalised and sampled"],
)
def test_one_launch_gives_the_tokens_of_steps_by_parts(params, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        expected = completions("cuda", 0, "bfloat16", params)
    launched = []
    honest = DeviceStepper.launch
    monkeypatch.setattr(
        DeviceStepper, "launch", lambda self, plan, **how: launched.append(how) or honest(self, plan, **how)
    )
    parts = []
    by_parts = HostStepper.launch
    monkeypatch.setattr(HostStepper, "launch", lambda self, plan: parts.append(plan) or by_parts(self, plan))
    for draft_tokens in (0, 1, 3, None):
        launched.clear()
        assert completions("cuda", draft_tokens, "bfloat16", params) == expected, f"K={draft_tokens}"
        assert {"goes_on": True} in launched, "no step was launched before the one before it was read"
    assert all(any(row.known_tokens for row in plan.rows) for plan in parts), "not only prompts went by parts"


def test_grammars_give_the_tokens_of_steps_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three launches, beside a row that is free."""
    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        expected = completions("cuda", 0, "bfloat16", HELD)
    parts, by_parts = [], HostStepper.launch
    monkeypatch.setattr(HostStepper, "launch", lambda self, plan: parts.append(plan) or by_parts(self, plan))
    for draft_tokens in (0, 1, 3, None):
        assert completions("cuda", draft_tokens, "bfloat16", HELD) == expected, f"K={draft_tokens}"
    assert all(any(row.known_tokens for row in plan.rows) for plan in parts), "not only prompts went by parts"


def test_log_probabilities_and_minimum_lengths_are_those_of_steps_by_parts(monkeypatch) -> None:
    def told(draft_tokens: int | None) -> list[tuple[tuple[int, ...], list[Any]]]:
        llm = LLM(device="cuda", dtype="bfloat16", mtp="on")
        asked = [replace(each, draft_tokens=draft_tokens) for each in TOLD]
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        llm.chat(chats, asked)  # shapes are recorded when they come again
        done = llm.chat(chats, asked)
        assert not llm.engine.faults.count
        return [(each.token_ids, list(each.logprobs or ())) for each in done]

    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        expected = told(0)
    assert [len(logprobs) for _, logprobs in expected] == [len(expected[0][0]), len(expected[1][0]), 0]
    assert len(expected[2][0]) >= TOLD[2].min_tokens
    parts, by_parts = [], HostStepper.launch
    monkeypatch.setattr(HostStepper, "launch", lambda self, plan: parts.append(plan) or by_parts(self, plan))
    for draft_tokens in (0, 1, 3, None):
        assert told(draft_tokens) == expected, f"K={draft_tokens}"
    assert all(any(row.known_tokens for row in plan.rows) for plan in parts), "not only prompts went by parts"


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_without_graphs_the_tokens_are_the_same(draft_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = completions("cuda", draft_tokens, "bfloat16")

    def unrecorded(_self, _key, function, given):
        return list(function([tensor.cuda() for tensor in given]))

    monkeypatch.setattr(CudaGraphs, "__call__", unrecorded)
    assert completions("cuda", draft_tokens, "bfloat16") == expected


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(("device", "draft_device"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_head_on_another_device(device: str, draft_device: str, dtype: str) -> None:
    """Its weights, its copies and its state are over there; the tokens are the target's, prefixes found or not."""
    expected = completions(device, 0, dtype)
    llm = LLM(device=device, dtype=dtype, mtp="on", draft_device=draft_device)
    proposer, state = llm.engine.proposer, llm.engine.state
    assert isinstance(proposer, RemoteHead)
    (name,) = proposer.inner.head.state_specs
    head_state = state.layers[name]
    assert isinstance(head_state, PagedKv)
    assert head_state.keys.device.type == state.carry_SD.device.type == draft_device
    assert state.last_token_S.device.type == device
    for draft_tokens in (3, 1, 8):  # from the second time on beginnings are found
        assert complete(llm, draft_tokens) == expected, f"K={draft_tokens}"
    cramped = {"cache_tokens": 256, "page_size": 16, "chunk_tokens": 24, "draft_device": draft_device}
    assert completions(device, 3, dtype, **cramped) == expected


@pytest.mark.parametrize("draft_device", [None, "cpu"])
def test_drafts_among_fewer_tokens(draft_device: str | None) -> None:
    expected = completions("cuda", 0, "bfloat16")
    for draft_vocab in (1, 500):
        found = completions("cuda", 3, "bfloat16", draft_vocab=draft_vocab, draft_device=draft_device)
        assert found == expected, f"{draft_vocab} tokens"
