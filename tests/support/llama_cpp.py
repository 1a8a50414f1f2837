"""llama.cpp as an oracle, through PyPI's `xllamacpp`, in a process of its own: a file it does not like aborts it.

Run as a module it reads one JSON object from stdin and prints one. Knows nothing of Headlong.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Reply:
    """Greedy tokens, and how many were drafted and accepted on the way."""

    tokens: list[int]
    drafted: int
    accepted: int


def generate(
    model: Path, prompts: list[list[int]], max_tokens: int, draft_tokens: int = 0, ignore_eos: bool = True
) -> list[Reply]:
    """What llama.cpp answers to `prompts`, with the model's MTP head where it is to draft. Skips without xllamacpp."""
    pytest.importorskip("xllamacpp", reason="xllamacpp (llama.cpp) is not installed")
    question = {
        "model": str(model),
        "prompts": prompts,
        "max_tokens": max_tokens,
        "draft_tokens": draft_tokens,
        "ignore_eos": ignore_eos,
    }
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(question), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"llama.cpp refused {model}:\n{done.stderr[-3000:]}"
    return [Reply(**reply) for reply in json.loads(done.stdout.splitlines()[-1])]


def _answer(question: dict[str, Any]) -> list[dict[str, Any]]:
    import httpx
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.model.path = question["model"]
    params.n_ctx, params.n_parallel, params.port, params.warmup = 1024, 1, 0, False
    # Keys and values in half precision would decide near-ties.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if question["draft_tokens"]:
        params.load_mtp = True
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        params.speculative.draft.n_max = question["draft_tokens"]
        params.speculative.draft.p_min = 0.0
    server = xllamacpp.Server(params)
    replies = []
    for prompt in question["prompts"]:
        body = {
            "prompt": prompt,
            "n_predict": question["max_tokens"],
            "temperature": 0,
            "repeat_penalty": 1.0,  # the file may recommend another
            "return_tokens": True,
            "cache_prompt": False,
            "ignore_eos": question["ignore_eos"],
        }
        found = httpx.post(f"{server.listening_address}/completion", json=body, timeout=60).json()
        timings = found["timings"]
        replies.append(
            {
                "tokens": found["tokens"],
                "drafted": timings.get("draft_n", 0),
                "accepted": timings.get("draft_n_accepted", 0),
            }
        )
    return replies


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.stdin.read()))))
