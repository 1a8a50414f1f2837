"""The engines behind one model, where there are several: for the page and for `/metrics`."""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headlong.engine.client import EngineStats, ReplicaStatus
from headlong.server.model import Model

COUNTERS = (
    ("replica_sequences", "Sequences that a replica has been given.", "requests"),
    (
        "replica_streams_resumed",
        "Those that another one had begun: resumed where it broke off.",
        "taken_over",
    ),
    ("replica_sequences_repeated", "Those that came to nothing at another one.", "repeated"),
)
STATES = ("ready", "draining", "lost")


def snapshot(replicas: Iterable[ReplicaStatus]) -> list[dict[str, Any]]:
    """What the page shows of each of them."""
    return [_shown(replica) for replica in replicas]


def readings(model: Model) -> Iterator[tuple[dict[str, str], EngineStats]]:
    """What the model's engine says, or each of its replicas that is not lost: labels and statistics."""
    replicas = model.client.replicas()
    for replica in replicas:
        if replica.stats is not None and replica.state != "lost":
            yield {"model_name": model.id, "replica": replica.id}, replica.stats
    if not replicas:
        yield {"model_name": model.id}, model.client.stats()


def metrics(models: Iterable[Model]) -> Iterator[Metric]:
    """How many replicas there are, and what became of what the lost ones ran. Nothing where no model has replicas."""
    several = [(model.id, replicas) for model in models if (replicas := model.client.replicas())]
    if not several:
        return
    gauge = GaugeMetricFamily("headlong:replicas", "Replicas of a model.", labels=["model_name", "state"])
    for name, replicas in several:
        for state in STATES:
            gauge.add_metric([name, state], sum(replica.state == state for replica in replicas))
    yield gauge
    for name, text, field in COUNTERS:
        counter = CounterMetricFamily(f"headlong:{name}", text, labels=["model_name", "replica"])
        for model, replicas in several:
            for replica in replicas:
                counter.add_metric([model, replica.id], getattr(replica, field))
        yield counter


def _shown(replica: ReplicaStatus) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "id": replica.id,
        "state": replica.state,
        "node": replica.node,
        "started": replica.started,
        "requests": replica.requests,
        "taken_over": replica.taken_over,
        "repeated": replica.repeated,
        "why": replica.why or None,
    }
    if replica.stats is None:
        return facts
    usage, totals = replica.stats.usage, replica.stats.totals
    return facts | {
        "running": usage.running,
        "waiting": usage.waiting,
        "pages_used": usage.pages_used,
        "pages_total": usage.pages_total,
        "tokens_per_second": replica.stats.rates.tokens_per_second,
        "asked_tokens": totals.asked_tokens,
        "cached_tokens": totals.cached_tokens,
        "completion_tokens": totals.generated_tokens,
        "drafted": totals.drafted,
        "accepted": totals.accepted,
    }
