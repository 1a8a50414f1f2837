"""Around every request: an id, the headers each answer has, and the one place where errors become answers.

Also keeps web pages of other origins away from a server that has no key: a browser on the same machine could be
made to call it. Knows no endpoint but for the dialect errors are told in.
"""

import contextlib
import logging
import secrets
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headlong import tracing
from headlong.errors import HeadlongError
from headlong.server.auth import is_loopback
from headlong.server.error_counts import ErrorCounts
from headlong.server.errors import CLIENT_GONE, ApiError, as_api_error
from headlong.server.logs import log_request
from headlong.server.reply import ClientGone, JsonReply

log = logging.getLogger(__name__)
ANTHROPIC, OLLAMA = "/v1/messages", "/api/"
MAX_REASON_CHARS = 500
"""The most characters of a refusal's reason that the log keeps."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
}


class Guard:
    """ASGI middleware around the whole application. `keyless`: nothing but its origin tells a page's request from a
    program's; `local_only`: requests must name this machine as their host."""

    def __init__(
        self, app: ASGIApp, *, errors: ErrorCounts, origins: tuple[str, ...], keyless: bool, local_only: bool
    ) -> None:
        self.app = app
        self._errors = errors
        self._keyless = keyless
        self._origins = origins
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        state["id"] = secrets.token_hex(12)
        with _traced(scope):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, started, status = scope["state"], time.perf_counter(), 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                # Anthropic's clients know the id under its shorter name.
                for name, value in {
                    **HEADERS,
                    "x-request-id": state["id"],
                    "request-id": state["id"],
                    **state.get("field_headers", {}),
                    **state.get("limit_headers", {}),
                }.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check_origin(Headers(scope=scope))
            await self.app(scope, receive, send_marked)
        except ClientGone:
            status = status or CLIENT_GONE
        except Exception as error:
            if status:
                raise  # half an answer is out; the connection must not look well
            await self._tell(error, scope, receive, send_marked)
        finally:
            self._count(status, state.get("error"))
            tracing.annotate({"http.response.status_code": status})
            if not state.get("recorded"):
                log_request(
                    request_id=state["id"],
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(time.perf_counter() - started, 4),
                    error=state.get("refusal"),
                )

    async def _tell(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        told = as_api_error(error)
        scope["state"]["refusal"] = told.reason[:MAX_REASON_CHARS]
        scope["state"]["error"] = told
        if told.status >= 500 and not isinstance(error, HeadlongError):
            log.error("request %s failed", scope["state"]["id"], exc_info=error)
        await JsonReply(_in_dialect(told, scope), told.status, told.headers)(scope, receive, send)

    def _count(self, status: int, error: ApiError | None) -> None:
        """Counts an answer that is an error, or a stream that ended with one."""
        if error is not None:
            self._errors.count(error.status, error.code or error.type)
        elif status >= 400:
            self._errors.count(status, "client_closed" if status == CLIENT_GONE else "other")

    def _check_origin(self, headers: Headers) -> None:
        if self._local_only and not is_loopback(_host(f"//{headers.get('host', '')}") or ""):
            raise ApiError(
                403,
                "host: this server answers on its own machine only; set an API key to open it",
                code="host",
            )
        origin = headers.get("origin")
        if origin is None or not self._keyless or origin in self._origins or "*" in self._origins:
            return
        if _netloc(origin) != headers.get("host", "").lower():
            raise ApiError(
                403,
                "origin: pages of other origins may not call this server; see cors_origins",
                code="origin",
            )


def _traced(scope: Scope) -> contextlib.AbstractContextManager[None]:
    """A span for what generates or changes something; pages and metrics are asked for without end."""
    if scope["method"] != "POST":
        return contextlib.nullcontext()
    attributes = {
        tracing.REQUEST_ID: scope["state"]["id"],
        "http.request.method": "POST",
        "url.path": scope["path"],
    }
    return tracing.span(f"POST {scope['path']}", attributes, kind="server", parent=Headers(scope=scope))


def _in_dialect(error: ApiError, scope: Scope) -> dict[str, Any]:
    if scope["path"].startswith(ANTHROPIC):
        return error.anthropic(scope["state"]["id"])
    return error.ollama() if scope["path"].startswith(OLLAMA) else error.openai()


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # brackets that do not close
        return None


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return None
