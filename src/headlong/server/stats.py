"""What the page shows, as one snapshot, on request or twice a second. Reads metrics, changes nothing."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headlong.server import replicas
from headlong.server.context import Server
from headlong.server.model import Model
from headlong.server.reply import STREAM_HEADERS, ClientGone, JsonReply, event, unless_gone

INTERVAL_SECONDS = 0.5


async def stats(request: Request) -> Response:
    return JsonReply(snapshot(request.app.state.server))


async def stats_stream(request: Request) -> Response:
    return _SnapshotStream(request.app.state.server)


def snapshot(server: Server) -> dict[str, Any]:
    model = server.pool.current
    common = {
        "time": time.time(),
        "uptime_s": round(time.monotonic() - server.started, 3),
        "draining": server.limit.draining,
        "keys": server.auth.has_keys,
        "requests": list(server.observer.history),
    }
    return common | ({"model": None} if model is None else _of_model(server, model))


def _of_model(server: Server, model: Model) -> dict[str, Any]:
    description, stats = model.client.description, model.client.stats()
    drafting, usage, totals, recent = description.drafting, stats.usage, stats.totals, stats.recent
    return {
        "model": model.id,
        "mtp": {
            "available": drafting.refusal is None,
            "reason": drafting.refusal,
            "default_k": drafting.usual,
            "max_k": drafting.deepest,
        },
        "sampling": dict(model.sampling),
        "rows": {
            "running": usage.running,
            "waiting": usage.waiting,
            "max": description.max_rows,
            "queue_limit": server.limit.max_queue,
        },
        "cache": {
            "pages_used": usage.pages_used,
            "pages_total": usage.pages_total,
            "slots_used": usage.slots_used,
            "slots_total": usage.slots_total,
        },
        "rates": asdict(stats.rates),
        "plain_tokens_per_second": description.plain_tokens_per_second,
        "positions": _positions(totals.tried_per_position, totals.accepted_per_position),
        "recent_positions": _positions(recent.tried_per_position, recent.accepted_per_position),
        "totals": {
            "requests": server.observer.num_requests,
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "completion_tokens": totals.generated_tokens,
            "drafted": totals.drafted,
            "accepted": totals.accepted,
        },
        "replicas": replicas.snapshot(model.client.replicas()),
    }


def _positions(tried: Sequence[int], accepted: Sequence[int]) -> list[dict[str, int]]:
    pairs = enumerate(zip(tried, accepted, strict=True), 1)
    return [{"position": place, "tried": some, "accepted": good} for place, (some, good) in pairs]


class _SnapshotStream(Response):
    """Streams snapshots until the client leaves or the server drains."""

    media_type = "text/event-stream"

    def __init__(self, server: Server) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            return

    async def _send_all(self, send: Send) -> None:
        while True:
            body = event(snapshot(self._server)).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._server.limit.draining:
                break
            await asyncio.sleep(INTERVAL_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
