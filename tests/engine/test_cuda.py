"""The engine on a GPU: same tokens with and without drafting.

In float64, by the reference ops, those of the CPU too: rounding cannot flip a near-tie, so any difference is a bug in
the logic or in a device copy. In bfloat16 by Triton's kernels, whose bits do not depend on a token's company.
"""

import pytest
import torch

from headlong import LLM, SamplingParams
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


def completions(device: str, draft_tokens: int, dtype: str = "float64") -> list[tuple[int, ...]]:
    llm = LLM(device=device, dtype=dtype, mtp="on")
    params = [
        SamplingParams(max_tokens=40, draft_tokens=draft_tokens),
        SamplingParams(max_tokens=40, draft_tokens=draft_tokens, temperature=0.8, seed=7, top_p=0.9),
        SamplingParams(max_tokens=40, draft_tokens=draft_tokens, repetition_penalty=1.2, logprobs=2),
    ]
    done = llm.chat([[{"role": "user", "content": prompt}] for prompt in PROMPTS], params)
    llm.engine.check_integrity()
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


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_without_graphs_the_tokens_are_the_same(draft_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = completions("cuda", draft_tokens, "bfloat16")

    def unrecorded(_self, _key, function, given):
        return list(function(given))

    monkeypatch.setattr(Graphs, "__call__", unrecorded)
    assert completions("cuda", draft_tokens, "bfloat16") == expected
