"""The answers of `/api/chat` and `/api/generate`: one object, or one on each line."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from headlong.server import accounting
from headlong.server.blocks import Block, arguments_object, is_json
from headlong.server.errors import ApiError
from headlong.server.generation import Piece, Result
from headlong.server.logprobs import shown
from headlong.server.model import Model
from headlong.server.reply import Exchange
from headlong.server.schemas.ollama import Generating
from headlong.text.output import Content, Reasoning
from headlong.types import TokenLogprobs

NDJSON = "application/x-ndjson"


class Lines(ABC):
    """Encodes answers as Ollama does. Subclasses know where text and calls are in an object. `began` is when the
    request was read, on the performance counter."""

    def __init__(self, model: Model, body: Generating, exchange: Exchange, began: float) -> None:
        self._model = model
        self._name = body.model
        self._logprobs = bool(body.logprobs)
        self._began = began
        self._loading = exchange.result.started - began
        self._prompt = exchange.job.prompts[0]
        self._num_calls = 0

    def start(self) -> str:
        return ""

    def piece(self, piece: Piece) -> str:
        content = "".join(one.text for one in piece.events if isinstance(one, Content))
        thinking = "".join(one.text for one in piece.events if isinstance(one, Reasoning))
        closed = [change.block for change in piece.changes if change.what == "closed"]
        calls = self._calls(closed, piece.chunk.finish_reason)
        more = self._shown(piece.chunk.logprobs)
        if not (content or thinking or calls or more):
            return ""
        return line(head(self._name) | self._said(content, thinking, calls) | {"done": False} | more)

    def end(self, result: Result) -> str:
        return line(head(self._name) | self._said("", "", []) | self._done(result))

    def error(self, error: ApiError) -> str:
        return line(error.ollama())

    def whole(self, result: Result) -> dict[str, Any]:
        choice = result.choices[0]
        calls = self._calls((one for one in choice.blocks if one.closed), choice.done.finish_reason)
        said = self._said(choice.content, choice.reasoning, calls)
        return head(self._name) | said | self._shown(choice.done.logprobs or ()) | self._done(result)

    @abstractmethod
    def _said(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The part of an object that holds text, thinking and calls."""

    def _calls(self, blocks: Iterable[Block], finish_reason: str | None) -> list[dict[str, Any]]:
        """The calls among blocks that ended. One that was cut off by the limit is not a call to carry out."""
        found: list[dict[str, Any]] = []
        for block in blocks:
            if block.type != "call" or (finish_reason == "length" and not is_json(block.text)):
                continue
            function = {"index": self._num_calls, "name": block.name}
            self._num_calls += 1
            found.append(
                {"id": block.call_id, "function": function | {"arguments": arguments_object(block.text)}}
            )
        return found

    def _done(self, result: Result) -> dict[str, Any]:
        """The end of an answer: why, how long it took in nanoseconds, and what drafting did."""
        completion = result.choices[0].done
        stats = completion.stats
        times = {
            "total_duration": time.perf_counter() - self._began,
            "load_duration": self._loading,
            "prompt_eval_duration": stats.prompt_seconds,
            "eval_duration": stats.decode_seconds,
        }
        return {
            "done": True,
            "done_reason": "length" if completion.finish_reason == "length" else "stop",
            "prompt_eval_count": stats.prompt_tokens,
            "eval_count": len(completion.token_ids),
            **{name: round(seconds * 1e9) for name, seconds in times.items()},
            **accounting.figures(result),
        }

    def _shown(self, logprobs: Iterable[TokenLogprobs]) -> dict[str, Any]:
        tokenizer = self._model.client.text.tokenizer
        given = shown(tokenizer, logprobs) if self._logprobs and tokenizer is not None else []
        return {"logprobs": given} if given else {}


class ChatLines(Lines):
    def _said(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateLines(Lines):
    def _said(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        assert not calls, "there are no tools"
        return {"response": content} | ({"thinking": thinking} if thinking else {})

    def _done(self, result: Result) -> dict[str, Any]:
        tokens = (*self._prompt, *result.choices[0].done.token_ids)
        return super()._done(result) | {"context": tokens}


def head(name: str) -> dict[str, Any]:
    """What every object begins with."""
    return {"model": name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def line(data: Mapping[str, Any]) -> str:
    """One line. Whatever is not ASCII is escaped: some clients take other characters for the end of a line, too."""
    return json.dumps(data, separators=(",", ":")) + "\n"
