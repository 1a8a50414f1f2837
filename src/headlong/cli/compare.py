"""Drafting against plain decoding of one prompt, in turns, on a warm engine. Knows no flags and no terminal."""

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from headlong.params import SamplingParams
from headlong.progress import ProgressFn

if TYPE_CHECKING:
    from headlong.llm import LLM
    from headlong.text.tokenizer import Tokenizer

ROUNDS = 3
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Comparison:
    """Speeds are tokens per second while decoding, from the median round; 0 where nothing was decoded."""

    difference: str | None
    """Where the tokens part, in words; None if they are identical."""
    drafting_speed: float = 0.0
    plain_speed: float = 0.0

    @property
    def speed_up(self) -> float | None:
        return self.drafting_speed / self.plain_speed if self.drafting_speed and self.plain_speed else None


def compare(
    llm: "LLM",
    prompt: tuple[int, ...],
    params: SamplingParams,
    expected: tuple[int, ...],
    progress: ProgressFn,
) -> Comparison:
    """`expected` are the tokens drafting gave before; every round of either kind must give them again."""
    kinds = {"drafting": params, "plain": replace(params, draft_tokens=0)}
    for own in kinds.values():
        llm.generate(prompt, _short(own))
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    total, count = ROUNDS * len(kinds), 0
    for turn in range(ROUNDS):
        # Turns begin with one kind and the other, so that a machine that slows down favours neither.
        for kind in sorted(kinds, reverse=bool(turn % 2)):
            progress("compare with plain decoding", count, total)
            done = llm.generate(prompt, kinds[kind])
            count += 1
            if difference := describe_difference(expected, done.token_ids, kind, llm.text.tokenizer):
                progress("compare with plain decoding", total, total)
                return Comparison(difference)
            seconds[kind].append(done.stats.decode_seconds / max(1, len(done.token_ids) - 1))
    progress("compare with plain decoding", total, total)
    speeds = {kind: 1.0 / middle if (middle := median(spent)) else 0.0 for kind, spent in seconds.items()}
    return Comparison(None, speeds["drafting"], speeds["plain"])


def describe_difference(
    expected: tuple[int, ...], found: tuple[int, ...], kind: str, tokenizer: "Tokenizer | None"
) -> str | None:
    """The first place where the two part, or None."""
    if expected == found:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )

    def name(tokens: tuple[int, ...]) -> str:
        if at >= len(tokens):
            return "the end"
        text = "" if tokenizer is None else f" {tokenizer.decode([tokens[at]], skip_special_tokens=False)!r}"
        return f"{tokens[at]}{text}"

    return f"at token {at}: first {name(expected)}, then ({kind}) {name(found)}"


def _short(params: SamplingParams) -> SamplingParams:
    count = min(params.max_tokens, WARM_UP_TOKENS)
    return replace(params, max_tokens=count, min_tokens=min(params.min_tokens, count))
