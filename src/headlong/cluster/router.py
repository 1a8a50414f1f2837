"""Ray Serve's request router that sends prompts where their beginnings are cached: `PrefixRouter`.

Named in a deployment's `request_router_config`; it runs wherever a handle to that deployment is used. The first
argument of a call is a `cluster.wire.Work`; replicas report `cluster.wire.RoutingStats` as `record_routing_stats`, its
`prefixes` from `LocalEngine.prefix_keys(prefix_index.REPORTED_KEYS)`, in hexadecimal. A call without work goes to the
less busy one of two.

None of Serve's mixins: they hand the replica that was found for one request to whichever waits longest, or prefer the
machine of the front. Serve pickles this module by value, so what there is to know is in other modules.
"""

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from headlong.cluster.loads import Loads
from headlong.cluster.prefix_index import PrefixIndex

CALL_TOKENS = 1
"""What a call that carries no work counts for."""


class PrefixRouter(RequestRouter):
    """Knows what the replicas hold and have to do, as far as they told and as far as it sent them there."""

    def initialize_state(self, max_keys: int = 262_144, seed: int = 0, **_: Any) -> None:
        """Called by Serve with the `request_router_kwargs` of the deployment's config."""
        self.index = PrefixIndex(max_keys, seed)
        self.loads = Loads()
        self.told: dict[str, dict[str, Any]] = {}
        """What each replica reported last."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas come, go, or report."""
        super().update_replicas(replicas)
        present = {name_of(replica.replica_id): replica for replica in replicas}
        for gone in [*self.told.keys() - present.keys()]:
            self._forget(gone)
        for name, replica in present.items():
            stats = replica.routing_stats
            if stats and stats != self.told.get(name):
                self.told[name] = stats
                self.loads.report(name, stats["queued_tokens"])
                self.index.report(name, [bytes.fromhex(key) for key in stats["prefixes"]], stats["page_size"])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a call found its replica dead, which the controller may not have noticed yet."""
        super().on_replica_actor_died(replica_id)
        self._forget(name_of(replica_id))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks the replicas, each a rank of its own. Where one takes no more, Serve asks the next; where none does, it
        asks here again after a while."""
        work = None if pending_request is None else work_of(pending_request)
        tokens, weight = ((), CALL_TOKENS) if work is None else (work.tokens, work.weight)
        by_name = {name_of(replica.replica_id): replica for replica in candidate_replicas}
        now = time.monotonic()
        loads = self.loads.of(self._allowed(work, list(by_name)), now)
        ranked = self.index.choose(tokens, weight, loads).replicas
        if pending_request is not None and ranked:
            # Without it Serve would ask again at once, without end.
            pending_request.routing_context.should_backoff = True
            call = pending_request.metadata.internal_request_id
            # Those that are placed meanwhile are to know of it, though it may be refused yet.
            if self.loads.sent(call, ranked[0], weight, now):
                self.index.sent(ranked[0], tokens)
        return [[by_name[name]] for name in ranked]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a call has ended, however it did."""
        super().on_request_completed(replica_id, internal_request_id)
        self.loads.done(internal_request_id)

    def _allowed(self, work: Any, names: list[str]) -> list[str]:
        """The replicas that may have this work: none that failed on it, and where it was begun elsewhere, those like
        that one, though they failed on it. Where there is none, all: whoever takes it says what is wrong, which is
        better than to wait."""
        if work is None:
            return names
        others = [name for name in names if name not in work.avoid]
        if not work.fingerprint:
            return others or names
        alike = [name for name in names if self._fingerprint(name) in (work.fingerprint, "")]
        return [name for name in alike if name not in work.avoid] or alike or others or names

    def _fingerprint(self, name: str) -> str:
        return self.told.get(name, {}).get("fingerprint", "")

    def _forget(self, name: str) -> None:
        self.told.pop(name, None)
        self.loads.forget(name)
        self.index.forget(name)


def name_of(replica_id: ReplicaID) -> str:
    """A replica's id as `Work.avoid` has it."""
    return replica_id.unique_id


def work_of(pending_request: PendingRequest) -> Any:
    """The work that a call carries, told by its fields, or None."""
    first = pending_request.args[0] if pending_request.args else None
    return first if hasattr(first, "tokens") and hasattr(first, "weight") else None
