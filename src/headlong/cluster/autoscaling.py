"""How many replicas the work at hand wants: Ray Serve's custom autoscaling policy, on tokens instead of requests.

Replicas report `queued_tokens` as `record_autoscaling_stats`: what their rows have to read and to generate at most.
Serve averages it over a while, asks `TokenPolicy`, and applies bounds, delays and factors of the deployment's own
config. Serve pickles this module by value. Knows no Ray: the context is looked at, not made.
"""

from collections.abc import Collection
from typing import Any

METRIC = "queued_tokens"


def wanted_replicas(tokens: float, ongoing: float, unplaced: float, target_tokens: float) -> float:
    """The number of replicas, not rounded, at which each has `target_tokens` to do. `tokens` are those of all
    replicas, which have `ongoing` requests; each of the `unplaced` requests, which wait for a place at a replica, is
    taken to be as long as those are."""
    usual = tokens / ongoing if ongoing >= 1 else 0.0
    return (tokens + unplaced * usual) / target_tokens


class TokenPolicy:
    """Called by Serve's controller for every decision."""

    def __init__(self, target_tokens: float) -> None:
        """`target_tokens` is what one replica should have to do at most, on average."""
        if target_tokens <= 0:
            raise ValueError(f"target_tokens is {target_tokens}; it must be positive")
        self.target_tokens = target_tokens

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The wanted number of replicas, and nothing to remember. Where no replica has reported yet, as many as there
        are to be already: silence is no reason to change."""
        reported: Collection[float] = (context.aggregated_metrics or {}).get(METRIC, {}).values()
        if not reported:
            return context.target_num_replicas, {}
        # A replica that has just begun to serve has not reported; it has nothing to do yet.
        queued = context.total_queued_requests or 0.0
        ongoing = max(0.0, context.total_num_requests - queued)
        return wanted_replicas(sum(reported), ongoing, queued, self.target_tokens), {}
