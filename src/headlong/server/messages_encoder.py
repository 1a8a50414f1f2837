"""The answer of `/v1/messages`: one object, or the events that build it up."""

from typing import Any

from headlong.server import accounting
from headlong.server.blocks import Block, Change, arguments_object
from headlong.server.errors import ApiError
from headlong.server.generation import Job, Piece, Result
from headlong.server.model import Model
from headlong.server.reply import event
from headlong.server.schemas.messages import MessagesRequest

_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesEncoder:
    """Encodes answers as Anthropic's messages. Content blocks are numbered like the blocks they are made from."""

    def __init__(self, model: Model, body: MessagesRequest, job: Job, request_id: str) -> None:
        self._model = model
        self._name = body.model or model.id
        self._job = job
        self._request_id = request_id

    def start(self) -> str:
        usage = _usage(len(self._job.prompts[0]), 0)
        message = self._message([]) | {"usage": usage}
        return _event("message_start", message=message) + _event("ping")

    def piece(self, piece: Piece) -> str:
        return "".join(map(_change, piece.changes))

    def end(self, result: Result) -> str:
        text = "".join(map(_change, result.choices[0].blocks.close()))
        figures = {"usage": self._usage(result)} | accounting.figures(result)
        return text + _event("message_delta", delta=_stop(result), **figures) + _event("message_stop")

    def error(self, error: ApiError) -> str:
        return event(error.anthropic(self._request_id), "error")

    def whole(self, result: Result) -> dict[str, Any]:
        content = [_content(block, block.text) for block in result.choices[0].blocks]
        usage = {"usage": self._usage(result)}
        return self._message(content) | _stop(result) | usage | accounting.figures(result)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "model": self._name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _usage(self, result: Result) -> dict[str, Any]:
        thinking = accounting.reasoning_tokens(result, self._model)
        usage = accounting.usage(result, thinking)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return _usage(usage["prompt_tokens"], usage["completion_tokens"], cached) | {
            "output_tokens_details": {"thinking_tokens": thinking}
        }


def _usage(asked: int, written: int, cached: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": asked - cached,
        "output_tokens": written,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _stop(result: Result) -> dict[str, str | None]:
    """The reason why the answer ended. A call cut off by the limit is not a call to carry out."""
    choice = result.choices[0]
    if choice.done.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(choice.done.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.done.stop_reason}
    return {"stop_reason": "tool_use" if choice.tool_calls else "end_turn", "stop_sequence": None}


def _change(change: Change) -> str:
    what, block, text = change
    if what == "opened":
        return _event("content_block_start", index=block.index, content_block=_content(block, ""))
    if what == "grew":
        kind, name = _DELTAS[block.type]
        return _delta(block, kind, {name: text})
    signed = _delta(block, "signature_delta", {"signature": ""}) if block.type == "reasoning" else ""
    return signed + _event("content_block_stop", index=block.index)


def _delta(block: Block, kind: str, said: dict[str, str]) -> str:
    return _event("content_block_delta", index=block.index, delta={"type": kind} | said)


def _content(block: Block, text: str) -> dict[str, Any]:
    match block.type:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "text":
            return {"type": "text", "text": text}
        case "call":
            return {
                "type": "tool_use",
                "id": block.call_id,
                "name": block.name,
                "input": arguments_object(text),
            }


def _event(name: str, /, **fields: Any) -> str:
    return event({"type": name} | fields, name)
