"""`/v1/chat/completions`: OpenAI's chat, streamed and whole."""

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headlong.server import accounting
from headlong.server.admission import admit
from headlong.server.body import read_json
from headlong.server.errors import ApiError
from headlong.server.generation import Choice, Piece, Result
from headlong.server.logprobs import prompt_shown, shown
from headlong.server.model import Model
from headlong.server.prompting import chat_job, sampling_fields
from headlong.server.renaming import composed, fields_named
from headlong.server.reply import DONE, event
from headlong.server.schemas.chat import ChatRequest
from headlong.server.trace import Tracer
from headlong.text.output import Content, OutputEvent, Reasoning, ToolCallArguments, ToolCallStart
from headlong.types import TokenLogprobs


async def chat_completions(request: Request) -> Response:
    body = await read_json(request, ChatRequest)
    job_id = f"chatcmpl-{request.state.id}"
    settings = request.app.state.server.settings
    make = partial(chat_job, body=body, settings=settings, job_id=job_id, endpoint="chat")
    with fields_named(composed(sampling_fields(body), request.state.renamed)):
        model, exchange = await admit(request, body.model, body.n or 1, make)
    encoder = ChatEncoder(model, body, job_id)
    return exchange.stream(encoder) if body.stream else await exchange.whole(encoder)


class ChatEncoder:
    """Encodes answers as OpenAI's chat completion objects and chunks."""

    def __init__(self, model: Model, body: ChatRequest, job_id: str) -> None:
        self._model = model
        self._body = body
        self._head = {"id": job_id, "created": int(time.time()), "model": body.model or model.id}
        self._unfinished = body.n or 1
        self._called: set[int] = set()
        """Choices that called a tool."""
        trace = body.speculative is not None and body.speculative.trace
        self._tracer = Tracer(model.client.text.tokenizer) if trace else None

    def start(self) -> str:
        opening = {"role": "assistant", "content": ""}
        return "".join(self._chunk(index, opening) for index in range(self._unfinished))

    def piece(self, piece: Piece) -> str:
        delta = _delta(piece.events)
        if "tool_calls" in delta:
            self._called.add(piece.index)
        more: dict[str, Any] = {}
        if self._body.logprobs and piece.chunk.logprobs:
            more["logprobs"] = {"content": self._logprobs(piece.chunk.logprobs)}
        extra = {} if self._tracer is None else self._tracer.step(piece)
        text = self._chunk(piece.index, delta, extra=extra, **more) if delta or more or extra else ""
        if piece.chunk.finish_reason is None:
            return text
        self._unfinished -= 1
        # The last choice's end waits for `end`, which has the figures that belong to it.
        self._last = (piece.index, piece.chunk.finish_reason)
        return text + (self._finish({}) if self._unfinished else "")

    def end(self, result: Result) -> str:
        text = self._finish(accounting.figures(result))
        options = self._body.stream_options
        if options is not None and options.include_usage:
            text += event(self._object("chat.completion.chunk", [], {"usage": self._usage(result)}))
        return text + DONE

    def error(self, error: ApiError) -> str:
        return event(error.openai()) + DONE

    def whole(self, result: Result) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in result.choices]
        extra = {"usage": self._usage(result)} | accounting.figures(result)
        read = result.completions[0].prompt_logprobs
        if read is not None:
            extra["prompt_logprobs"] = prompt_shown(self._model.client.text.tokenizer, read)
        return self._object("chat.completion", choices, extra)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.tool_calls
            ]
        logprobs = choice.done.logprobs
        return {
            "index": choice.index,
            "message": message,
            "logprobs": None if logprobs is None else {"content": self._logprobs(logprobs)},
            "finish_reason": _reason(choice.done.finish_reason, bool(choice.tool_calls)),
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], *, extra: dict[str, Any] | None = None, **more: Any
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return event(self._object("chat.completion.chunk", [choice], extra or {}))

    def _finish(self, extra: dict[str, Any]) -> str:
        index, reason = self._last
        return self._chunk(index, {}, finish_reason=_reason(reason, index in self._called), extra=extra)

    def _object(self, kind: str, choices: list[dict[str, Any]], extra: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"object": kind, "choices": choices} | extra

    def _usage(self, result: Result) -> dict[str, Any]:
        return accounting.usage(result, accounting.reasoning_tokens(result, self._model))

    def _logprobs(self, logprobs: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
        tokenizer = self._model.client.text.tokenizer
        assert tokenizer is not None, "chat needs one"
        return shown(tokenizer, logprobs)


def _delta(events: tuple[OutputEvent, ...]) -> dict[str, Any]:
    """Joins all that one step added into one delta."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for one in events:
        match one:
            case Reasoning(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case ToolCallStart(index, call_id, name):
                calls[index] = {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            case ToolCallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _reason(reason: str, called: bool) -> str:
    """A call cut off by the limit is not a call to carry out."""
    return "tool_calls" if called and reason == "stop" else reason
