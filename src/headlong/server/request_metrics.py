"""The histograms of `/metrics` that are about requests: how long each part took, and how long the texts were.

Names are vLLM's stems under the prefix `headlong:`. Knows no endpoint.
"""

import itertools
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from headlong.completion import Completion
from headlong.server.generation import Result

STEPS = (1.0, 2.5, 5.0)
"""The bounds of buckets within each power of ten."""
LEAST_SECONDS, MOST_TOKENS = 0.001, 1_000_000
TIMES = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a choice.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "What a choice waited until it was first admitted.",
    "request_prefill_time_seconds": "From there to its first token.",
    "request_decode_time_seconds": "The steps that gave it its other tokens.",
    "request_inference_time_seconds": "Prefill and decode together.",
    "request_time_per_output_token_seconds": "A choice's mean time per token after the first.",
}
LENGTHS = {
    "request_prompt_tokens": "Tokens of a prompt, computed or cached.",
    "request_generation_tokens": "Tokens of a choice's output.",
}


class RequestMetrics:
    """Counts and measures requests that ended, by model. It is used on the event loop alone."""

    def __init__(self, registry: CollectorRegistry, timeout: float) -> None:
        """`timeout` is the most seconds that a request may take: buckets reach that far."""

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"headlong:{name}", text, ["model_name"], registry=registry, buckets=buckets)

        seconds, tokens = time_buckets(timeout), token_buckets()
        self._histograms = {name: histogram(name, text, seconds) for name, text in TIMES.items()}
        self._histograms |= {name: histogram(name, text, tokens) for name, text in LENGTHS.items()}
        self._ended = Counter(
            "headlong:request_success_total",
            "Requests that ended, by how.",
            ["model_name", "finished_reason"],
            registry=registry,
        )

    def ended(self, model: str, reason: str, gaps: Iterable[tuple[float, int]], result: Result) -> None:
        """`gaps` are seconds between two chunks of the same choice, and the tokens in the later one."""
        self._ended.labels(model, reason).inc()
        self._observe(model, "e2e_request_latency_seconds", result.seconds)
        if result.first_token is not None:
            self._observe(model, "time_to_first_token_seconds", result.first_token)
        between = self._histograms["inter_token_latency_seconds"].labels(model)
        for gap, tokens in gaps:
            for _ in range(tokens):
                between.observe(gap / tokens)
        for choice in result.choices:
            if choice.completion is not None and choice.completion.token_ids:
                self._choice(model, choice.completion)

    def _choice(self, model: str, completion: Completion) -> None:
        stats, later = completion.stats, len(completion.token_ids) - 1
        self._observe(model, "request_queue_time_seconds", stats.queue_seconds)
        self._observe(model, "request_prefill_time_seconds", stats.prefill_seconds)
        self._observe(model, "request_decode_time_seconds", stats.decode_seconds)
        self._observe(model, "request_inference_time_seconds", stats.prefill_seconds + stats.decode_seconds)
        self._observe(model, "request_prompt_tokens", stats.prompt_tokens)
        self._observe(model, "request_generation_tokens", len(completion.token_ids))
        if later:
            self._observe(model, "request_time_per_output_token_seconds", stats.decode_seconds / later)

    def _observe(self, model: str, name: str, value: float) -> None:
        self._histograms[name].labels(model).observe(value)


def time_buckets(most: float) -> list[float]:
    """Bounds from a millisecond to `most` seconds."""
    bounds = (LEAST_SECONDS * 10**power * step for power in itertools.count() for step in STEPS)
    return [*(round(one, 4) for one in itertools.takewhile(lambda bound: bound < most * 0.999, bounds)), most]


def token_buckets() -> list[float]:
    """Bounds from a single token to the longest contexts, each about twice the one before."""
    bounds = (10.0**power * step for power in itertools.count() for step in (1, 2, 5))
    return list(itertools.takewhile(lambda bound: bound <= MOST_TOKENS, bounds))
