"""Counts answers that are errors, by status and reason, for `/metrics`. Used on the event loop alone."""

from prometheus_client import CollectorRegistry, Counter

FULL = (429, "queue_full")


class ErrorCounts:
    """Counts under names of this server's own: nothing that a client wrote becomes a label."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._errors = Counter(
            "headlong:http_errors_total",
            "Answers that were errors, and streams that ended with one.",
            ["status", "reason"],
            registry=registry,
        )
        self._labelled(*FULL)  # there from the start, so that a rate has something to begin with

    def count(self, status: int, reason: str) -> None:
        self._labelled(status, reason).inc()

    def _labelled(self, status: int, reason: str) -> Counter:
        return self._errors.labels(str(status), reason)
