"""Samples -> numbers: percentiles, throughput, acceptance, and ratios within each round. Knows no server, no table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from headlong.cli.load.acceptance import Drafts
from headlong.cli.load.answer import Failure, Sample
from headlong.cli.load.drive import Block
from headlong.cli.load.workload import Mtp

PLAIN = "off"


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolates a percentile linearly between two values, as numpy does; `values` are sorted and not empty."""
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


class Spread(NamedTuple):
    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(p50, p90, p99, sum(ordered) / len(ordered), ordered[-1])

    def as_json(self, scale: float = 1.0) -> dict[str, float]:
        return {name: round(scale * value, 4) for name, value in self._asdict().items()}


class Ratio(NamedTuple):
    """Throughput over that of the setting `to`, in each round in which both were measured to the end."""

    to: Mtp
    rounds: list[float]

    def as_json(self) -> dict[str, Any]:
        low, high = min(self.rounds), max(self.rounds)
        numbers = {"median": median(self.rounds), "min": low, "max": high}
        return {"to": self.to, **{name: round(value, 4) for name, value in numbers.items()}}


@dataclass(frozen=True)
class Cell:
    """One setting at one concurrency, over all its blocks. Times are in seconds, of requests that succeeded."""

    concurrency: int
    mtp: Mtp
    requests: int
    completed: int
    failures: list[Failure]
    resent: int
    seconds: float
    output_tokens: int
    prompt_tokens: int | None
    counted_by: dict[str, int]
    finish_reasons: dict[str, int]
    ttft: Spread | None
    itl: Spread | None
    gap: Spread | None
    e2e: Spread | None
    stream_tokens_per_second: Spread | None
    lag: Spread | None
    drafts: Drafts | None
    tokens_per_step: float | None
    ratio: Ratio | None
    complete: bool

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> float | None:
        return self.drafts.accepted / self.drafts.drafted if self.drafts and self.drafts.drafted else None

    @property
    def errors(self) -> dict[str, int]:
        return dict(Counter(failure.kind for failure in self.failures).most_common())

    def as_json(self) -> dict[str, Any]:
        times = {"ttft": self.ttft, "itl": self.itl, "gap": self.gap, "e2e": self.e2e, "client_lag": self.lag}
        streams = self.stream_tokens_per_second
        drafts = self.drafts and {
            "source": self.drafts.source,
            "drafted": self.drafts.drafted,
            "accepted": self.drafts.accepted,
            "rate": _rounded(self.acceptance),
            "tokens_per_step": _rounded(self.tokens_per_step),
        }
        return {
            "concurrency": self.concurrency,
            "mtp": self.mtp,
            "complete": self.complete,
            "requests": self.requests,
            "completed": self.completed,
            "errors": self.errors,
            "resent": self.resent,
            "seconds": round(self.seconds, 4),
            "output_tokens": self.output_tokens,
            "prompt_tokens": self.prompt_tokens,
            "tokens_counted_by": self.counted_by,
            "finish_reasons": self.finish_reasons,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "requests_per_second": round(self.completed / self.seconds, 4) if self.seconds else 0.0,
            "stream_tokens_per_second": streams and streams.as_json(),
            **{f"{name}_ms": spread and spread.as_json(1000) for name, spread in times.items()},
            "acceptance": drafts,
            "ratio": self.ratio and self.ratio.as_json(),
        }


def summarise(blocks: list[Block], *, with_rate: bool) -> list[Cell]:
    """One cell for each concurrency and setting, in the order of the first round."""
    groups: dict[tuple[int, Mtp], list[Block]] = {}
    for block in blocks:
        groups.setdefault((block.slot.concurrency, block.slot.mtp), []).append(block)
    settings = list(dict.fromkeys(mtp for _, mtp in groups))
    base = PLAIN if PLAIN in settings else settings[0] if settings else None
    cells = []
    for (concurrency, mtp), own in groups.items():
        # With a rate it is the arrivals that set the throughput.
        compared = mtp != base and not with_rate
        plain = groups.get((concurrency, base), []) if compared else []
        cells.append(_cell(concurrency, mtp, own, _ratio(base, own, plain)))
    return cells


def _cell(concurrency: int, mtp: Mtp, blocks: list[Block], ratio: Ratio | None) -> Cell:
    samples = [sample for block in blocks for sample in block.samples]
    good = [sample for sample in samples if sample.failure is None]
    prompts = [sample.prompt_tokens for sample in good if sample.prompt_tokens is not None]
    drafts, tokens_per_step = _drafting(good, blocks)
    return Cell(
        concurrency=concurrency,
        mtp=mtp,
        requests=len(samples),
        completed=len(good),
        failures=[sample.failure for sample in samples if sample.failure is not None],
        resent=sum(sample.resent for sample in samples),
        seconds=sum(block.seconds for block in blocks),
        output_tokens=sum(sample.output_tokens for sample in good),
        prompt_tokens=sum(prompts) if prompts else None,
        counted_by=dict(Counter(sample.counted_by for sample in good)),
        finish_reasons=dict(Counter(sample.finish_reason or "none" for sample in good)),
        ttft=Spread.of([sample.first for sample in good if sample.first is not None]),
        itl=Spread.of([itl for sample in good if (itl := time_per_token(sample)) is not None]),
        gap=Spread.of([gap for sample in good for gap in sample.gaps]),
        e2e=Spread.of([sample.ended for sample in good]),
        stream_tokens_per_second=Spread.of([s.output_tokens / s.ended for s in good if s.ended > 0]),
        lag=Spread.of([lag for block in blocks for lag in block.lags]),
        drafts=drafts,
        tokens_per_step=tokens_per_step,
        ratio=ratio,
        complete=all(block.complete for block in blocks),
    )


def time_per_token(sample: Sample) -> float | None:
    """Seconds per token after the first one: the time from the first chunk to the last, divided by the tokens but one.
    It is None where one chunk held all."""
    if sample.first is None or sample.last is None or not sample.gaps or sample.output_tokens < 2:
        return None
    return (sample.last - sample.first) / (sample.output_tokens - 1)


def _drafting(good: list[Sample], blocks: list[Block]) -> tuple[Drafts | None, float | None]:
    """Drafts, and tokens per step: a step gives its accepted drafts and one token of the target's own; a request's
    first token comes with its prompt."""
    telling = [sample for sample in good if sample.drafts is not None]
    if telling:
        parts = [sample.drafts for sample in telling if sample.drafts is not None]
    else:
        telling = good
        parts = [block.counted for block in blocks if block.counted is not None]
        if len(parts) < len(blocks):
            return None, None
    if not parts:
        return None, None
    drafts = Drafts(parts[0].source, sum(p.drafted for p in parts), sum(p.accepted for p in parts))
    tokens = sum(max(0, sample.output_tokens - 1) for sample in telling)
    steps = tokens - drafts.accepted
    return drafts, tokens / steps if steps > 0 else None


def _ratio(base: Mtp, own: list[Block], plain: list[Block]) -> Ratio | None:
    reference = {block.slot.round: speed for block in plain if (speed := _speed(block))}
    rounds = [
        speed / reference[block.slot.round]
        for block in own
        if block.slot.round in reference and (speed := _speed(block))
    ]
    return Ratio(base, rounds) if rounds else None


def _speed(block: Block) -> float | None:
    """Tokens per second of a block that came to its end."""
    if not block.complete or not block.seconds:
        return None
    return sum(s.output_tokens for s in block.samples if s.failure is None) / block.seconds


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
