"""Headlong and transformers as contestants. llama.cpp has a file of its own, since `footprint.py` imports it alone."""

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from headlong import LLM, Completion, SamplingParams
from headlong.progress import silent
from llama_cpp import Prompt, Timed

ROWS, CONTEXT = 8, 1024
PLAIN, ADAPTIVE = "headlong plain", "headlong adaptive"
STORIES = (
    "Write a short story about a shy dragon who learns to share.",
    "Tell me about a girl who finds a lost kitten.",
    "Explain rain to a child.",
    "Write a letter to a friend about a new puppy.",
    "Write a story about two friends and a kite.",
    "Give me three tips for sleeping better.",
    "Write a poem about the sea.",
    "Tell me how bread is made.",
)


class Headlong:
    """Our engine, through its public API."""

    def __init__(self, model: Path) -> None:
        self.llm = LLM(
            model, device="cpu", max_rows=ROWS, max_context=CONTEXT, prefix_cache=False, progress=silent
        )

    def prompts(self) -> list[Prompt]:
        return [self.llm.service.text.encode_chat([{"role": "user", "content": story}]) for story in STORIES]

    def decode(self, prompts: Sequence[Prompt], max_tokens: int, drafts: int | None) -> Timed:
        """One prompt after the other; `drafts` None leaves the depth to the engine."""
        params = SamplingParams(max_tokens=max_tokens, draft_tokens=drafts, ignore_eos=True)
        num_tokens, seconds, done = 0, 0.0, []
        for prompt in prompts:
            steps = self.llm.stream(prompt, params)
            first = len(next(steps).token_ids)
            started = perf_counter()
            done += [step.completion for step in steps if step.completion]
            seconds += perf_counter() - started
            num_tokens += max_tokens - first
        return _timed(num_tokens, seconds, done, max_tokens)

    def together(self, prompts: Sequence[Prompt], max_tokens: int, drafts: int | None) -> Timed:
        params = SamplingParams(max_tokens=max_tokens, draft_tokens=drafts, ignore_eos=True)
        started = perf_counter()
        done = self.llm.generate(prompts, params)
        seconds = perf_counter() - started
        return _timed(len(prompts) * max_tokens, seconds, done, max_tokens)

    def read(self, prompts: Sequence[Prompt]) -> Timed:
        """Prompts alone, one after the other."""
        params = SamplingParams(max_tokens=1, draft_tokens=0, ignore_eos=True)
        started = perf_counter()
        done = [self.llm.generate(prompt, params) for prompt in prompts]
        seconds = perf_counter() - started
        _check_whole(done, 1)
        return Timed(sum(map(len, prompts)), seconds)

    def depths(self, depths: Sequence[int]) -> dict[str, int | None]:
        """Contestants by name, plain first; without a head it is alone."""
        if self.llm.mtp_refusal is not None:
            return {PLAIN: 0}
        return {PLAIN: 0} | {f"headlong K={depth}": depth for depth in depths} | {ADAPTIVE: None}


def _check_whole(done: list[Completion], max_tokens: int) -> None:
    """A row that failed, or a prompt that was not read, would look fast."""
    for completion in done:
        if len(completion.token_ids) != max_tokens:
            raise SystemExit(f"headlong stopped short of {max_tokens} tokens: {completion.stop_reason}")
        if completion.stats.cached_tokens:
            raise SystemExit("headlong took a prompt from its cache, which should be off")


def _timed(num_tokens: int, seconds: float, done: list[Completion], max_tokens: int) -> Timed:
    _check_whole(done, max_tokens)
    return Timed(num_tokens, seconds, tuple(c.token_ids for c in done), tuple(c.text for c in done))


class Clock:
    """Told of the prompt and then of every token by `generate`; keeps when the first token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: object) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    """`transformers.generate` in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def decode(self, prompt: Prompt, max_tokens: int) -> Timed:
        ids, clock = torch.tensor([prompt]), Clock()
        quiet = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "pad_token_id": 0}
        quiet["repetition_penalty"] = 1.0  # the model recommends another
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                eos_token_id=None,
                streamer=clock,
                **quiet,
            )
        _, first, *_, last = clock.times
        return Timed(max_tokens - 1, last - first)
