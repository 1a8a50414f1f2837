"""llama.cpp as a contestant, by way of the PyPI package `xllamacpp`. Knows nothing of Headlong.

One `LlamaCpp` is one server inside this process: its slots and its draft depth are fixed when it is opened. Prompt
caches are off, so that every prompt is read, and everything stays on the CPU. Speeds are its own `timings`, except for
sequences that run together, whose time is that of the wall clock.
"""

# pyright: reportAttributeAccessIssue=false
# A compiled module without stubs: the type checker sees nothing in xllamacpp.
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import xllamacpp

Prompt = tuple[int, ...]
MTP = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP


@dataclass(frozen=True)
class Timed:
    """What a contestant did, one entry of `tokens` and `texts` a prompt where it tells them."""

    num_tokens: int
    """Those the seconds were spent on."""
    seconds: float
    tokens: tuple[Prompt, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds


class LlamaCpp:
    """A model opened by llama.cpp, with `rows` slots of `context` tokens each."""

    def __init__(
        self, model: Path, *, threads: int, drafts: int = 0, rows: int = 1, context: int = 1024
    ) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_parallel, params.n_ctx = rows, rows * context
        params.n_gpu_layers, params.fit_params, params.verbosity = 0, False, 0
        params.cache_ram_mib = params.n_ctx_checkpoints = 0
        used = [params.cpuparams, params.cpuparams_batch]
        if drafts:
            params.speculative.types = [MTP]
            params.speculative.draft.n_max = drafts
            used += [params.speculative.draft.cpuparams, params.speculative.draft.cpuparams_batch]
        for cpu in used:
            cpu.n_threads = threads
        self.drafts, self.rows = drafts, rows
        self.server = xllamacpp.Server(params)

    def decode(self, prompts: Sequence[Prompt], max_tokens: int) -> Timed:
        """One prompt after the other. Counts the tokens after each first one, and the time after it."""
        replies = [self._ask(prompt, max_tokens) for prompt in prompts]
        if self.drafts and not any(reply["timings"].get("draft_n") for reply in replies):
            raise SystemExit(f"llama.cpp drafted nothing at K={self.drafts}: it would count as its MTP")
        return Timed(
            sum(reply["timings"]["predicted_n"] - 1 for reply in replies),
            sum(reply["timings"]["predicted_ms"] for reply in replies) / 1000,
            texts=_texts(replies),
        )

    def together(self, prompts: Sequence[Prompt], max_tokens: int) -> Timed:
        """All at the same time, a thread for each; the time from the first request to the last reply."""
        with ThreadPoolExecutor(self.rows) as pool:
            started = perf_counter()
            replies = list(pool.map(self._ask, prompts, [max_tokens] * len(prompts)))
            seconds = perf_counter() - started
        return Timed(len(prompts) * max_tokens, seconds, texts=_texts(replies))

    def read(self, prompts: Sequence[Prompt]) -> Timed:
        """Prompts alone, one after the other."""
        timings = [self._ask(prompt, 1)["timings"] for prompt in prompts]
        return Timed(
            sum(timing["prompt_n"] for timing in timings),
            sum(timing["prompt_ms"] for timing in timings) / 1000,
        )

    def _ask(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        request = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "repeat_penalty": 1.0,
        }
        reply = self.server.handle_completions(request | {"ignore_eos": True, "cache_prompt": False})
        if "error" in reply:
            raise SystemExit(f"llama.cpp: {reply['error']['message']}")
        usage = reply["usage"]
        if (usage["prompt_tokens"], usage["completion_tokens"]) != (len(prompt), max_tokens):
            raise SystemExit(f"llama.cpp was asked for {len(prompt)} + {max_tokens} tokens, but used {usage}")
        return reply


def features() -> str:
    """The instruction sets its wheel was built for, which may be fewer than this machine has."""
    return xllamacpp.get_system_info().strip(" |")


def _texts(replies: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(reply["choices"][0]["text"] for reply in replies)
