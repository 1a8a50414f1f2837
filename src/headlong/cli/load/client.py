"""An OpenAI-compatible server over HTTP: who it is, its counters, and one timed streaming request at a time.

Speaks to the server and times it; what is sent, and when, comes from elsewhere.
"""

import asyncio
import json
import ssl
import time
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from headlong.cli.load.acceptance import Drafts, counters
from headlong.cli.load.answer import Answer, Failure, Sample, error_message, one_line
from headlong.cli.load.sse import EventReader, MalformedStream
from headlong.errors import ConfigError

CONNECT_SECONDS = 10.0
SIDE_SECONDS = 10.0
"""Seconds that the small requests around the measured ones may take."""
LINGER_SECONDS = 1.0
"""How long to wait after [DONE] for the body's own end, without which the connection cannot be used again."""
IDLE_SECONDS = 1.0
"""Connections idle for longer are dropped: servers close theirs after about 5 s, and a request sent just then fails."""
MAX_BODY = 1 << 20
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Identity(NamedTuple):
    """What a server says of itself."""

    software: str | None
    """The value of the server's `Server` header; None if it sends none."""
    version: Any
    """The JSON of /version, where there is one."""
    models: list[dict[str, Any]]


def server_root(url: str) -> str:
    """The address that `/v1/...` follows; with or without a scheme, a last slash or `/v1` of its own."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, named = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not named or parts.query or parts.fragment:
        raise ConfigError(f"--url {url}: is not an address such as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ConfigError("--url: leave user and password out of the address; a key goes into --api-key")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


@dataclass
class Client:
    """A client of one server. `send` never raises for what the server does: a failure is part of the `Sample`."""

    root: str
    api_key: str | None
    endpoint: str
    timeout: float
    include_usage: bool = True
    """Whether requests ask for usage; it is cleared for a server that refuses `stream_options`."""

    def __post_init__(self) -> None:
        # No compression: what is timed is when chunks arrive, not when a decoder lets go of them.
        headers = {"accept-encoding": "identity"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        host = urlsplit(self.root).hostname or ""

        def connect(kept: int | None) -> httpx.AsyncClient:
            return httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=min(CONNECT_SECONDS, self.timeout)),
                limits=httpx.Limits(max_keepalive_connections=kept, keepalive_expiry=IDLE_SECONDS),
                # A proxy between here and this very machine would only be measured along.
                trust_env=host not in ("localhost", "127.0.0.1", "::1"),
            )

        try:
            self._http, self._fresh = connect(None), connect(0)
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(f"--url {self.root}: {one_line(str(error))}") from error

    async def close(self) -> None:
        await self._http.aclose()
        await self._fresh.aclose()

    async def identify(self) -> Identity:
        """Asks the server who it is. It raises where nobody answers or the key is refused; a server that lists no
        models is fine."""
        try:
            response = await self._get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ssl.SSLError) as error:
            raise ConfigError(
                f"--url {self.root}: no server answers there ({_why(error)}); `headlong serve` starts one"
            ) from error
        self.check_key(response.status_code, _message(response.content))
        listed = _json(response.content) if response.status_code == 200 else None
        models = listed.get("data") if isinstance(listed, dict) else None
        models = [m for m in models or [] if isinstance(m, dict) and isinstance(m.get("id"), str)]
        version = None
        try:
            answer = await self._get("/version")
            version = _json(answer.content) if answer.status_code == 200 else None
        except (httpx.HTTPError, TimeoutError):
            pass
        return Identity(response.headers.get("server"), version, models)

    def check_key(self, status: int, message: str) -> None:
        if status in (401, 403):
            what = "the server refuses this key" if self.api_key else "the server wants a key"
            raise ConfigError(f"--api-key: {what} ({status}: {message}); give one, or set HEADLONG_API_KEY")

    async def draft_counters(self) -> Drafts | None:
        """The totals so far on /metrics; None where there is no such page, or no such counters."""
        try:
            response = await self._get("/metrics")
        except (httpx.HTTPError, TimeoutError):
            return None
        return counters(response.text) if response.status_code == 200 else None

    async def _get(self, path: str) -> httpx.Response:
        async with asyncio.timeout(SIDE_SECONDS):
            return await self._http.get(self.root + path)

    async def send(self, fields: dict[str, Any], due: float | None = None) -> Sample:
        """Sends one request. `due`, on the clock of `time.perf_counter`, is what its times count from (default:
        now)."""
        body = {**fields, "stream": True}
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        content = json.dumps(body).encode()
        start = time.perf_counter() if due is None else due
        answer = Answer()
        try:
            async with asyncio.timeout(self.timeout) as limit:
                try:
                    await self._exchange(self._http, content, answer, start, limit)
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    # Some servers (llama.cpp) close connections after they said they would keep them.
                    if answer.status is not None:
                        raise
                    answer.resent = True
                    await self._exchange(self._fresh, content, answer, start, limit)
        except (httpx.HTTPError, TimeoutError, MalformedStream, ssl.SSLError) as error:
            if answer.done_at is None:
                answer.failure = answer.failure or _failure(error, self.timeout, answer.status)
        return answer.sample(time.perf_counter() - start)

    async def _exchange(
        self, http: httpx.AsyncClient, content: bytes, answer: Answer, start: float, limit: asyncio.Timeout
    ) -> None:
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        url = self.root + PATHS[self.endpoint]
        async with http.stream("POST", url, content=content, headers=headers) as response:
            answer.status = response.status_code
            if response.status_code == 200:
                await _read(response, answer, start, limit)
            else:
                await _read_refusal(response, answer)


async def _read(response: httpx.Response, answer: Answer, start: float, limit: asyncio.Timeout) -> None:
    """Reads the response into the answer. All events of one read came at the same time."""
    reader, lingering = EventReader(), False
    async for received in response.aiter_raw():
        now = time.perf_counter() - start
        for event in reader.feed(received):
            answer.take(event, now)
        if answer.failure is not None:
            return
        if answer.done_at is not None and not lingering:
            lingering = True
            limit.reschedule(asyncio.get_running_loop().time() + LINGER_SECONDS)
    for event in reader.finish():
        answer.take(event, time.perf_counter() - start)


async def _read_refusal(response: httpx.Response, answer: Answer) -> None:
    content = bytearray()
    async for received in response.aiter_raw():
        content += received
        if len(content) > MAX_BODY:
            break
    kind = "429" if response.status_code == 429 else f"http {response.status_code}"
    answer.failure = Failure(kind, _message(bytes(content)))
    answer.retry_after = _seconds(response.headers.get("retry-after"))


def _failure(error: Exception, timeout: float, status: int | None) -> Failure:
    if isinstance(error, MalformedStream):
        return Failure("not a stream", str(error))
    if isinstance(error, TimeoutError):
        return Failure("timeout", f"no end after {timeout:g} s")
    # Once the answer has begun, a lost connection is something else than none.
    return Failure("connection" if status is None else "cut off", _why(error))


def _why(error: BaseException) -> str:
    return one_line(str(error)) or type(error).__name__


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _message(content: bytes) -> str:
    return (
        error_message(_json(content))
        or one_line(content.decode("utf-8", errors="replace"))
        or "no reason given"
    )


def _seconds(header: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is not waited for."""
    return float(header) if header is not None and header.isascii() and header.isdigit() else None
