"""`/metrics`: the engines' counters under vLLM's stems, with the prefix `headlong:`, and how full they are.

The histograms of requests are the observer's; they share the registry.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from headlong.server.model import Model
from headlong.server.pool import ModelPool


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
        yield from _counters(models)
        yield _per_position(models)
        yield from _gauges(models)


def _counters(models: list[Model]) -> Iterator[Metric]:
    totals = [(model.id, model.metrics.totals()) for model in models]
    for name, text, field in (
        ("spec_decode_num_drafts", "Row steps that had drafts.", "draft_runs"),
        ("spec_decode_num_draft_tokens", "Tokens drafted.", "drafted"),
        ("spec_decode_num_accepted_tokens", "Drafts the target agreed with.", "accepted"),
        ("prompt_tokens", "Prompt tokens read.", "prompt_tokens"),
        ("prefix_cache_queries", "Prompt tokens that were asked for.", "asked_tokens"),
        ("prefix_cache_hits", "Those of them that the prefix cache had.", "cached_tokens"),
        ("generation_tokens", "Tokens generated.", "generated_tokens"),
        ("num_preemptions", "Rows put back to wait.", "preempted"),
        ("num_steps", "Passes of the target.", "steps"),
    ):
        family = CounterMetricFamily(f"headlong:{name}", text, labels=["model_name"])
        for model, total in totals:
            family.add_metric([model], getattr(total, field))
        yield family


def _per_position(models: list[Model]) -> Metric:
    family = CounterMetricFamily(
        "headlong:spec_decode_num_accepted_tokens_per_pos",
        "Drafts the target agreed with, by their place in the draft, from 0.",
        labels=["model_name", "position"],
    )
    for model in models:
        for place, accepted in enumerate(model.metrics.totals().accepted_per_position):
            family.add_metric([model.id, str(place)], accepted)
    return family


def _gauges(models: list[Model]) -> Iterator[Metric]:
    usages = [(model.id, model.llm.usage) for model in models]
    shares = {
        "num_requests_running": ("Sequences in the batch.", lambda use: use.running),
        "num_requests_waiting": ("Sequences that wait for a place.", lambda use: use.waiting),
        "kv_cache_usage_perc": (
            "Share of the cache's pages in use, 0 to 1.",
            lambda use: use.pages_used / use.pages_total,
        ),
        "recurrent_slot_usage_perc": (
            "Share of the recurrent slots in use, 0 to 1.",
            lambda use: use.slots_used / use.slots_total,
        ),
    }
    for name, (text, read) in shares.items():
        family = GaugeMetricFamily(f"headlong:{name}", text, labels=["model_name"])
        for model, usage in usages:
            family.add_metric([model], read(usage))
        yield family
