"""The engine on a GPU, with the reference ops: same tokens with and without drafting, and those of the CPU.

In float64, where rounding cannot flip a near-tie: any difference is a bug in the logic or in a device copy.
"""

import pytest
import torch

from headlong import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = (
    "Explain rain to a child.",
    "Write a short story about a kite.",
    "Give me three tips for sleeping better.",
)


def completions(device: str, draft_tokens: int) -> list[tuple[int, ...]]:
    llm = LLM(device=device, dtype="float64", mtp="on")
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
