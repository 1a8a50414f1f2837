"""One streamed answer, event by event, in the dialects of several servers -> a `Sample`. Knows no sockets."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from headlong.cli.load.acceptance import Drafts, count, reported
from headlong.cli.load.sse import Event
from headlong.printable import printable

USAGE, TIMINGS, CHUNKS = "usage", "timings", "chunks"
MESSAGE_LEN = 300


class Failure(NamedTuple):
    kind: str
    """What failures are counted by: `429`, `http 500`, `timeout`, `connection`, `cut off`, ..."""
    message: str


@dataclass(frozen=True)
class Sample:
    """One request as the client saw it. Times are in seconds since it was due."""

    ended: float
    first: float | None = None
    """When the first chunk with text came."""
    last: float | None = None
    gaps: Sequence[float] = ()
    """Seconds between chunks with text, in their order."""
    output_tokens: int = 0
    counted_by: str = CHUNKS
    prompt_tokens: int | None = None
    drafts: Drafts | None = None
    finish_reason: str | None = None
    fingerprint: str | None = None
    failure: Failure | None = None
    status: int | None = None
    retry_after: float | None = None
    resent: bool = False
    """The server had closed a connection that it said it would keep, and the request went out once more."""


def one_line(text: str) -> str:
    """A server's words, fit for a terminal: one line, no control characters, not too long."""
    line = printable(" ".join(text[: 4 * MESSAGE_LEN].split()))
    return line if len(line) <= MESSAGE_LEN else line[: MESSAGE_LEN - 1] + "…"


def error_message(body: object) -> str | None:
    """What an error object says, as OpenAI, vLLM, FastAPI or llama.cpp would write it."""
    if not isinstance(body, dict):
        return None
    error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return one_line(error if isinstance(error, str) else json.dumps(error))


class Answer:
    """Takes the events of one stream as they come. The first failure stays."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.retry_after: float | None = None
        self.resent = False
        self.done_at: float | None = None
        self.failure: Failure | None = None
        self._times: list[float] = []
        self._body: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._fingerprint: str | None = None

    def take(self, event: Event, now: float) -> None:
        if self.done_at is not None or self.failure is not None:
            return
        if event.data.strip() == "[DONE]":
            self.done_at = now
            return
        try:
            chunk = json.loads(event.data)
        except (ValueError, RecursionError):
            chunk = None
        if event.name == "error" or (isinstance(chunk, dict) and chunk.get("error")):
            self.failure = Failure("error in stream", error_message(chunk) or one_line(event.data))
        elif isinstance(chunk, dict):
            self._take_chunk(chunk, now)
        else:
            self.failure = Failure("not a stream", f"an event that is no JSON object: {one_line(event.data)}")

    def _take_chunk(self, chunk: dict[str, Any], now: float) -> None:
        # Statistics come with the last chunk, or in one of their own after it, or (vLLM) again and again.
        self._body |= {name: chunk[name] for name in ("usage", "timings", "metrics") if chunk.get(name)}
        fingerprint = chunk.get("system_fingerprint")
        if isinstance(fingerprint, str):
            self._fingerprint = fingerprint
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if not isinstance(choice, dict):
                continue
            if _has_text(choice):
                self._times.append(now)
            if isinstance(choice.get("finish_reason"), str):
                self._finish_reason = choice["finish_reason"]

    def sample(self, ended: float) -> Sample:
        """What is known at the end of the stream: [DONE], or where none came, `ended`. One that just stops has
        failed."""
        failure = self.failure
        if failure is None and self.done_at is None and self._finish_reason is None:
            begun = bool(self._times or self._body)
            failure = (
                Failure("cut off", "the stream ended without a finish_reason or [DONE]")
                if begun
                else Failure("not a stream", "the answer has no events; the server may not be able to stream")
            )
        usage = self._body.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        times = self._times
        output_tokens, counted_by = self._output_tokens(usage)
        return Sample(
            ended=ended if self.done_at is None else self.done_at,
            first=times[0] if times else None,
            last=times[-1] if times else None,
            # Eight bytes each: long runs hold millions of them.
            gaps=array("d", (b - a for a, b in pairwise(times))),
            output_tokens=output_tokens,
            counted_by=counted_by,
            prompt_tokens=count(usage.get("prompt_tokens")),
            drafts=reported(self._body),
            finish_reason=self._finish_reason,
            fingerprint=self._fingerprint,
            failure=failure,
            status=self.status,
            retry_after=self.retry_after,
            resent=self.resent,
        )

    def _output_tokens(self, usage: dict[str, Any]) -> tuple[int, str]:
        timings = self._body.get("timings")
        for counted_by, value in (
            (USAGE, usage.get("completion_tokens")),
            (TIMINGS, timings.get("predicted_n") if isinstance(timings, dict) else None),
        ):
            if (tokens := count(value)) is not None:
                return tokens, counted_by
        return len(self._times), CHUNKS


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether anything generated is in it; a first chunk often only names the role."""
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    return bool(
        choice.get("text")
        or any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    )
