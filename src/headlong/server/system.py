"""`/health`, `/ping`, `/version` and what a key allows: for those who watch the server."""

from starlette.requests import Request
from starlette.responses import Response

from headlong.server.reply import JsonReply
from headlong.version import __version__


async def health(request: Request) -> Response:
    """Answers 200 while requests are served, and 503 with the reason once they are not."""
    server = request.app.state.server
    model = server.pool.current
    failures = [(one, why) for one in server.pool.loaded() if (why := one.client.failure) is not None]
    if server.limit.draining:
        return JsonReply({"status": "draining"}, 503)
    if failures:
        reason = "; ".join(f"{one.id}: {failure}" for one, failure in failures)
        return JsonReply({"status": "error", "reason": reason}, 503)
    return JsonReply({"status": "ok", "model": None if model is None else model.id})


async def ping(request: Request) -> Response:
    return await health(request)


async def permission(request: Request) -> Response:
    """Answers as tabbyAPI does: `admin`, or `api` for everybody else who may use the models."""
    return JsonReply({"permission": "admin" if request.state.caller.admin else "api"})


async def version(_: Request) -> Response:
    return JsonReply({"version": __version__})
