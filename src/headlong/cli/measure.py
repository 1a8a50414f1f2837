"""Plain decoding against depths of drafting, on the same prompts, interleaved. Knows no flags, no tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

from headlong.cli.compare import describe_difference
from headlong.params import SamplingParams
from headlong.progress import ProgressFn

if TYPE_CHECKING:
    from headlong.completion import Completion
    from headlong.llm import LLM

Tokens = tuple[int, ...]


class TokensDiffer(Exception):
    """Drafting changed the output; its speed is of no interest."""


@dataclass(frozen=True)
class Pass:
    """One pass over all prompts. Batches run one after another: each lasts as long as its slowest row decodes."""

    completions: "list[Completion]"
    tokens: int
    seconds: float
    steps: int


@dataclass(frozen=True)
class Result:
    """One depth: medians over the rounds; `speed_ups` has one entry per round, against plain in that round."""

    depth: int
    tokens_per_step: float
    acceptance: list[float]
    ms_per_step: float
    tokens_per_second: float
    speed_ups: list[float]

    @property
    def speed_up(self) -> float:
        return median(self.speed_ups)

    def as_json(self) -> dict[str, Any]:
        return {
            "draft_tokens": self.depth,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "acceptance_per_position": [round(share, 4) for share in self.acceptance],
            "ms_per_step": round(self.ms_per_step, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "speed_up": round(self.speed_up, 4),
            "speed_up_min": round(min(self.speed_ups), 4),
            "speed_up_max": round(max(self.speed_ups), 4),
        }


def measure(
    llm: "LLM",
    prompts: list[Tokens],
    params: SamplingParams,
    depths: list[int],
    rounds: int,
    rows: int,
    progress: ProgressFn,
) -> list[Result]:
    """`depths` holds 0. The first pass of each only warms up and is checked; every later one is checked too."""
    passes: dict[int, list[Pass]] = {depth: [] for depth in depths}
    total, count = len(depths) * (rounds + 1), 0
    try:
        for turn in range(rounds + 1):
            # Another depth goes first in every round, so that none always runs on the cooler machine.
            first = max(0, turn - 1) % len(depths)
            for depth in depths[first:] + depths[:first]:
                progress("bench", count, total)
                passes[depth].append(_run(llm, prompts, replace(params, draft_tokens=depth), rows))
                count += 1
                _check(llm, passes[0][0] if passes[0] else None, depth, passes[depth][-1])
    finally:
        progress("bench", total, total)
    return [_result(depth, passes[depth][1:], passes[0][1:]) for depth in depths]


def _run(llm: "LLM", prompts: list[Tokens], params: SamplingParams, rows: int) -> Pass:
    completions: list[Completion] = []
    seconds, steps = 0.0, 0
    for start in range(0, len(prompts), rows):
        batch: list[Completion] = llm.generate(prompts[start : start + rows], params)
        seconds += max(done.stats.decode_seconds for done in batch)
        steps += max(done.stats.steps for done in batch)
        completions.extend(batch)
    return Pass(completions, sum(len(done.token_ids) - 1 for done in completions), seconds, steps)


def _check(llm: "LLM", plain: Pass | None, depth: int, own: Pass) -> None:
    assert plain is not None, "plain decoding goes first"
    for number, (expected, found) in enumerate(zip(plain.completions, own.completions, strict=True), 1):
        kind = f"draft_tokens {depth}"
        difference = describe_difference(expected.token_ids, found.token_ids, kind, llm.text.tokenizer)
        if difference is not None:
            raise TokensDiffer(f"prompt {number} differs from plain decoding {difference}")


def _result(depth: int, own: list[Pass], plain: list[Pass]) -> Result:
    steps = sum(done.stats.steps for done in own[0].completions)
    return Result(
        depth=depth,
        tokens_per_step=own[0].tokens / steps if steps else 0.0,
        acceptance=_acceptance(own[0].completions),
        ms_per_step=1000 * median(p.seconds / p.steps if p.steps else 0.0 for p in own),
        tokens_per_second=median(p.tokens / p.seconds if p.seconds else 0.0 for p in own),
        speed_ups=[b.seconds / a.seconds if a.seconds else 1.0 for a, b in zip(own, plain, strict=True)],
    )


def _acceptance(completions: "Sequence[Completion]") -> list[float]:
    """The acceptance rate at each depth, over all completions."""
    tried = zip_longest(*(done.stats.tried_per_position for done in completions), fillvalue=0)
    accepted = zip_longest(*(done.stats.accepted_per_position for done in completions), fillvalue=0)
    return [sum(a) / sum(t) if sum(t) else 0.0 for a, t in zip(accepted, tried, strict=True)]
