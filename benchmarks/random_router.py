"""What prefix routing is compared with: any replica, whatever it holds and does."""

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class RandomRouter(RequestRouter):
    """Named in a deployment's `request_router_config`."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]
