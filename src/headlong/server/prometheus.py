"""`/metrics`: the engines' counters under vLLM's stems, with the prefix `headlong:`, and how full they are.

Where a model has replicas, each of them has its own counters, with a label. The histograms of requests are the
observer's; they share the registry.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from headlong.engine.client import EngineStats, Totals, Usage
from headlong.server import replicas
from headlong.server.pool import ModelPool

Reading = tuple[dict[str, str], EngineStats]
"""An engine's labels, and what it says at this moment."""
COUNTERS: tuple[tuple[str, str, Callable[[Totals], int]], ...] = (
    ("spec_decode_num_drafts", "Row steps that had drafts.", lambda totals: totals.draft_runs),
    ("spec_decode_num_draft_tokens", "Tokens drafted.", lambda totals: totals.drafted),
    ("spec_decode_num_accepted_tokens", "Drafts the target agreed with.", lambda totals: totals.accepted),
    ("prompt_tokens", "Prompt tokens read.", lambda totals: totals.prompt_tokens),
    ("prefix_cache_queries", "Prompt tokens that were asked for.", lambda totals: totals.asked_tokens),
    ("prefix_cache_hits", "Those of them that the prefix cache had.", lambda totals: totals.cached_tokens),
    ("generation_tokens", "Tokens generated.", lambda totals: totals.generated_tokens),
    ("num_preemptions", "Rows put back to wait.", lambda totals: totals.preempted),
    ("num_steps", "Passes of the target.", lambda totals: totals.steps),
)
GAUGES: tuple[tuple[str, str, Callable[[Usage], float]], ...] = (
    ("num_requests_running", "Sequences in the batch.", lambda usage: usage.running),
    ("num_requests_waiting", "Sequences that wait for a place.", lambda usage: usage.waiting),
    (
        "kv_cache_usage_perc",
        "Share of the cache's pages in use, 0 to 1.",
        lambda usage: usage.pages_used / usage.pages_total,
    ),
    (
        "recurrent_slot_usage_perc",
        "Share of the recurrent slots in use, 0 to 1.",
        lambda usage: usage.slots_used / usage.slots_total,
    ),
)


async def metrics(request: Request) -> Response:
    return Response(generate_latest(request.app.state.server.registry), media_type=CONTENT_TYPE_LATEST)


class EngineCollector(Collector):
    """Reads every loaded model's counters when it is asked."""

    def __init__(self, pool: ModelPool, registry: CollectorRegistry) -> None:
        self._pool = pool
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        models = self._pool.loaded()
        read = [reading for model in models for reading in replicas.readings(model)]
        yield from _counters(read)
        yield _per_position(read)
        yield from _gauges(read)
        yield from replicas.metrics(models)


def _counters(read: list[Reading]) -> Iterator[Metric]:
    for name, text, count in COUNTERS:
        family = CounterMetricFamily(f"headlong:{name}", text)
        for labels, stats in read:
            family.add_sample(f"headlong:{name}_total", labels, count(stats.totals))
        yield family


def _per_position(read: list[Reading]) -> Metric:
    family = CounterMetricFamily(
        "headlong:spec_decode_num_accepted_tokens_per_pos",
        "Drafts the target agreed with, by their place in the draft, from 0.",
    )
    for labels, stats in read:
        for place, accepted in enumerate(stats.totals.accepted_per_position):
            family.add_sample(f"{family.name}_total", labels | {"position": str(place)}, accepted)
    return family


def _gauges(read: list[Reading]) -> Iterator[Metric]:
    for name, text, value in GAUGES:
        family = GaugeMetricFamily(f"headlong:{name}", text)
        for labels, stats in read:
            family.add_sample(f"headlong:{name}", labels, value(stats.usage))
        yield family
