"""The answer of `/v1/responses`: one object, or the events that build it up.

A stream's last event holds the object that would have come whole: both are made the same way.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from headlong.server import accounting
from headlong.server.blocks import Block, Blocks, Change, cut_off
from headlong.server.errors import ApiError
from headlong.server.generation import Job, Piece, Result
from headlong.server.logprobs import TextLogprobs
from headlong.server.model import Model
from headlong.server.reply import event
from headlong.server.response_tools import OfferedTools, custom_input
from headlong.server.schemas.responses import NamedTool, ResponsesRequest

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_STEMS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


_CUSTOM = "response.custom_tool_call_input"


class ResponsesEncoder:
    """Encodes answers as OpenAI's responses. Output items are numbered like the blocks they are made from."""

    def __init__(
        self,
        model: Model,
        body: ResponsesRequest,
        job: Job,
        blocks: Blocks,
        offered: OfferedTools,
        keep: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        """`blocks` are those of the one choice, which grow while it is generated. `keep` stores the response, where it
        is to be stored."""
        self._model, self._offered, self._keep = model, offered, keep
        self._body = body
        self._job = job
        self._created = int(time.time())
        self._sequence = itertools.count()
        self._blocks = blocks
        self._logprobs: TextLogprobs | None = None
        if body.wants_logprobs:
            tokenizer = model.client.text.tokenizer
            assert tokenizer is not None and job.make_parser is not None, "a chat has both"
            self._logprobs = TextLogprobs(tokenizer, job.make_parser())

    def start(self) -> str:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: Piece) -> str:
        if self._logprobs is not None:
            self._logprobs.push(piece.chunk.logprobs)
        return "".join(self._change(change, piece.chunk.finish_reason) for change in piece.changes)

    def end(self, result: Result) -> str:
        reason = result.completions[0].finish_reason
        if self._logprobs is not None:
            self._logprobs.finish()
        changes = self._blocks.close()
        for block in _shown(self._blocks, reason)[len(self._blocks) :]:
            changes += [Change("opened", block), Change("closed", block)]
        text = "".join(self._change(change, reason) for change in changes)
        response = self._finished(result)
        return text + self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> str:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        output = [self._item(block, "incomplete", self._logprobs) for block in self._blocks]
        failure = {"error": {"code": code, "message": error.message}}
        return self._event(
            "error", code=error.code or error.type, message=error.message, param=error.param
        ) + self._event("response.failed", response=self._response("failed", output) | failure)

    def whole(self, result: Result) -> dict[str, Any]:
        if self._logprobs is not None:
            self._logprobs.push(result.completions[0].logprobs or ())
            self._logprobs.finish()
        return self._finished(result)

    def _finished(self, result: Result) -> dict[str, Any]:
        choice = result.choices[0]
        reason = choice.done.finish_reason
        output = [
            self._item(block, _status(block, choice.blocks, reason), self._logprobs)
            for block in _shown(choice.blocks, reason)
        ]
        response = self._response("incomplete" if reason == "length" else "completed", output)
        response |= {"completed_at": int(time.time()), "usage": self._usage(result)}
        if reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response |= accounting.figures(result)
        if self._keep is not None:
            self._keep(response)
        return response

    def _change(self, change: Change, reason: str | None) -> str:
        block, stem = change.block, _STEMS[change.block.type]
        place = {"item_id": self._item_id(block), "output_index": block.index}
        if block.type != "call":
            place["content_index"] = 0
        match change.what:
            case "opened":
                return self._opened(block, place)
            case "grew":
                if self._is_custom(block):
                    return ""  # its text is known once its arguments are whole
                more = {}
                if block.type == "text":
                    more["logprobs"] = [] if self._logprobs is None else self._logprobs.more(block.index)
                return self._event(f"{stem}.delta", **place, delta=change.text, **more)
            case "closed":
                return self._closed(block, place, _status(block, self._blocks, reason))

    def _opened(self, block: Block, place: dict[str, Any]) -> str:
        item = self._item(block, "in_progress", None)
        text = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.type != "call":
            part = _part(block.type, "", [])
            text += self._event("response.content_part.added", **place, part=part)
        return text

    def _closed(self, block: Block, place: dict[str, Any], status: str) -> str:
        item = self._item(block, status, self._logprobs)
        stem = _STEMS[block.type]
        if self._is_custom(block):
            text = self._event(f"{_CUSTOM}.delta", **place, delta=item["input"])
            text += self._event(f"{_CUSTOM}.done", **place, input=item["input"])
        elif block.type == "call":
            text = self._event(f"{stem}.done", **place, name=item["name"], arguments=block.text)
        else:
            part = item["content"][0]
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            text = self._event(f"{stem}.done", **place, **said)
            text += self._event("response.content_part.done", **place, part=part)
        return text + self._event("response.output_item.done", output_index=block.index, item=item)

    def _item(self, block: Block, status: str, logprobs: TextLogprobs | None) -> dict[str, Any]:
        """The output item of a block, as events show it; it has no content while it is in progress."""
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        begun = status == "in_progress"
        if block.type == "call":
            return item | self._call(block, begun)
        tokens = [] if logprobs is None else logprobs.all(block.index)
        content = [] if begun else [_part(block.type, block.text, tokens)]
        if block.type == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _call(self, block: Block, begun: bool) -> dict[str, Any]:
        origin, arguments = self._offered.origin(block.name), "" if begun else block.text
        call: dict[str, Any] = {"call_id": block.call_id, "name": origin.name}
        if origin.namespace is not None:
            call["namespace"] = origin.namespace
        if origin.custom:
            return {"type": "custom_tool_call", **call, "input": custom_input(arguments)}
        return {"type": "function_call", **call, "arguments": arguments}

    def _is_custom(self, block: Block) -> bool:
        return block.type == "call" and self._offered.origin(block.name).custom

    def _item_id(self, block: Block) -> str:
        prefix = "ctc" if self._is_custom(block) else _PREFIXES[block.type]
        return f"{prefix}_{self._job.id.removeprefix('resp_')}_{block.index}"

    def _event(self, name: str, /, **fields: Any) -> str:
        return event({"type": name, "sequence_number": next(self._sequence)} | fields, name)

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self._job.params
        format = body.text.format if body.text is not None else None
        choice = body.tool_choice
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": body.model or self._model.id,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": {"type": "text"} if format is None else _dump(format)},
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "tools": [_dump(tool) for tool in body.tools or ()],
            "tool_choice": _dump(choice) if isinstance(choice, NamedTool) else choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "truncation": "disabled",
            "store": self._keep is not None,
            "background": False,
            "previous_response_id": body.previous_response_id,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
        }

    def _usage(self, result: Result) -> dict[str, Any]:
        usage = accounting.usage(result, accounting.reasoning_tokens(result, self._model))
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def _shown(blocks: Blocks, finish_reason: str) -> list[Block]:
    """The blocks to show: an answer that ended has a message or a call in it, if only an empty message."""
    listed = list(blocks)
    if finish_reason != "length" and all(block.type == "reasoning" for block in listed):
        listed.append(Block("text", len(listed)))
    return listed


def _status(block: Block, blocks: Blocks, finish_reason: str | None) -> str:
    return "incomplete" if cut_off(block, blocks, finish_reason) else "completed"


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _dump(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(by_alias=True)
