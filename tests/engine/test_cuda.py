"""The engine on a GPU: same tokens with and without drafting.

In float64, by the reference ops, those of the CPU too: rounding cannot flip a near-tie, so any difference is a bug in
the logic or in a device copy. In bfloat16 by Triton's kernels, whose bits do not depend on a token's company.
"""

from dataclasses import replace

import pytest
import torch

from headlong import LLM, SamplingParams
from headlong.engine.whole_step import WholeStep
from headlong.ops.graphs import Graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = (
    "Explain rain to a child.",
    "Write a short story about a kite.",
    "Give me three tips for sleeping better.",
)


MIXED = (
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.8, seed=7, top_p=0.9),
    SamplingParams(max_tokens=40, repetition_penalty=1.2, logprobs=2),
)
GREEDY = (SamplingParams(max_tokens=80), SamplingParams(max_tokens=50), SamplingParams(max_tokens=20))
SAMPLED = tuple(
    SamplingParams(max_tokens=60, temperature=0.8, seed=seed, top_p=0.9, top_k=50) for seed in (1, 2, 3)
)


def completions(
    device: str, draft_tokens: int | None, dtype: str = "float64", params: tuple[SamplingParams, ...] = MIXED
) -> list[tuple[int, ...]]:
    llm = LLM(device=device, dtype=dtype, mtp="on")
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_give_the_same_tokens_at_every_depth(dtype: str) -> None:
    expected = completions("cuda", 0, dtype)
    for draft_tokens in (1, 3, 8):
        assert completions("cuda", draft_tokens, dtype) == expected, f"K={draft_tokens}"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_one_launch_gives_the_tokens_of_steps_by_parts(params, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(WholeStep, "takes", lambda _self, _plan: False)
        expected = completions("cuda", 0, "bfloat16", params)
    launched = []
    honest = WholeStep.__call__
    monkeypatch.setattr(WholeStep, "__call__", lambda self, plan: launched.append(plan) or honest(self, plan))
    for draft_tokens in (0, 1, 3, None):
        launched.clear()
        assert completions("cuda", draft_tokens, "bfloat16", params) == expected, f"K={draft_tokens}"
        assert launched


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_without_graphs_the_tokens_are_the_same(draft_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = completions("cuda", draft_tokens, "bfloat16")

    def unrecorded(_self, _key, function, given):
        return list(function([tensor.cuda() for tensor in given]))

    monkeypatch.setattr(Graphs, "__call__", unrecorded)
    assert completions("cuda", draft_tokens, "bfloat16") == expected
