"""Conversations of many turns through any engine client, and what became of them. For `cluster.py` and its simulator.

Every turn's prompt is all that came before, with a question of its own, as tokens. Conversations of one family begin
alike. Answers have a fixed length, so that every run computes the same tokens.
"""

import asyncio
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from headlong.engine.client import EngineClient
from headlong.params import SamplingParams

VOCAB = 7000


@dataclass(frozen=True)
class Workload:
    """What is asked for; all lengths are in tokens."""

    conversations: int = 24
    turns: int = 4
    families: int = 3
    family_tokens: int = 192
    """The beginning that the conversations of one family share."""
    first_tokens: int = 64
    question_tokens: int = 32
    answer_tokens: int = 48
    clients: int = 8
    """Turns that are asked for at the same time. A conversation waits until all others have had theirs."""
    seed: int = 0

    def beginning(self, conversation: int) -> tuple[int, ...]:
        """The first turn's prompt."""
        shared = random.Random(f"{self.seed} family {conversation % self.families}")
        own = random.Random(f"{self.seed} conversation {conversation}")
        return (*_tokens(shared, self.family_tokens), *_tokens(own, self.first_tokens))

    def question(self, conversation: int, turn: int) -> tuple[int, ...]:
        """What a later turn adds to what was said before."""
        return _tokens(random.Random(f"{self.seed} {conversation} {turn}"), self.question_tokens)


@dataclass
class Run:
    """What one run of a workload gave."""

    seconds: float = 0.0
    front_seconds: float = 0.0
    """The processor's seconds of this process."""
    all_seconds: float = 0.0
    """The processor's seconds of this process and all that it started."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answers: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Tokens by conversation and turn."""
    strayed: int = 0
    """Later turns that found less cached than the turn before had left: another replica, or a cache that was full."""
    steps: int = 0
    step_seconds: float = 0.0
    """Seconds of all steps after answers' first tokens, by the engine's own clock."""
    pauses: list[float] = field(default_factory=list)
    """Seconds between the chunks of one answer."""
    first: list[float] = field(default_factory=list)
    """Seconds until an answer's first chunk."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers.values()))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def pause(self, percent: int) -> float:
        """The given percentile of the pauses, in seconds."""
        return statistics.quantiles(self.pauses, n=100, method="inclusive")[percent - 1]


async def drive(client: EngineClient, workload: Workload) -> Run:
    """Asks for all turns of all conversations."""
    run, said = Run(), {number: workload.beginning(number) for number in range(workload.conversations)}
    waiting = deque((number, 0) for number in said)

    async def ask_on() -> None:
        while waiting:
            conversation, turn = waiting.popleft()
            prompt = said[conversation]
            answer, cached = await _ask(client, workload, prompt, f"{conversation}-{turn}", run)
            run.answers[conversation, turn] = answer
            run.strayed += turn > 0 and cached + workload.question_tokens + workload.answer_tokens < len(
                prompt
            )
            said[conversation] = (*prompt, *answer, *workload.question(conversation, turn + 1))
            if turn + 1 < workload.turns:
                waiting.append((conversation, turn + 1))

    everything = cpu_seconds()
    started, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(ask_on() for _ in range(workload.clients)))
    run.seconds, run.front_seconds = time.perf_counter() - started, time.process_time() - spent
    run.all_seconds = cpu_seconds() - everything
    return run


def cpu_seconds() -> float:
    """What this process and those that it started have had of the processors so far."""
    this = psutil.Process()
    times = [one.cpu_times() for one in (this, *this.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def _ask(
    client: EngineClient, workload: Workload, prompt: Sequence[int], name: str, run: Run
) -> tuple[tuple[int, ...], int]:
    """The answer's tokens, and how many of the prompt's were cached."""
    params = SamplingParams(max_tokens=workload.answer_tokens, temperature=0, ignore_eos=True)
    requests = client.prepare([tuple(prompt)], params, name)
    tokens: list[int] = []
    cached = 0
    last = asked = time.perf_counter()
    async for chunk in client.stream(requests):
        now = time.perf_counter()
        if tokens:
            run.pauses.append(now - last)
        elif chunk.token_ids:
            run.first.append(now - asked)
        last = now
        tokens.extend(chunk.token_ids)
        if chunk.completion is not None:
            stats = chunk.completion.stats
            cached = stats.cached_tokens
            run.steps += stats.steps
            run.step_seconds += stats.decode_seconds
    run.prompt_tokens += len(prompt)
    run.cached_tokens += cached
    return tuple(tokens), cached


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, VOCAB) for _ in range(count))
