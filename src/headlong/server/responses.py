"""`/v1/responses`: OpenAI's newer chat.

Translates the body into a `ChatRequest`; `responses_encoder` says the answer, `response_store` keeps it, and
`response_tools` knows what tools are offered as.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headlong.errors import RequestError
from headlong.server.admission import admit
from headlong.server.blocks import Blocks
from headlong.server.body import read_json
from headlong.server.generation import Job
from headlong.server.model import Model
from headlong.server.prompting import DRAFTING_FIELDS, chat_job
from headlong.server.renaming import fields_named
from headlong.server.response_store import ResponseStore
from headlong.server.response_tools import OfferedTools, custom_arguments, custom_input
from headlong.server.responses_encoder import ResponsesEncoder
from headlong.server.schemas import chat
from headlong.server.schemas.base import JsonSchema, ResponseFormat, Sampling
from headlong.server.schemas.responses import (
    CustomCallItem,
    Format,
    FunctionCallItem,
    FunctionOutputItem,
    GrammarFormat,
    Item,
    JsonSchemaFormat,
    MessageItem,
    NamedTool,
    Part,
    PlainFormat,
    ReasoningItem,
    ReasoningText,
    RegexFormat,
    ResponsesRequest,
    TextPart,
)
from headlong.server.settings import Settings

_FIELDS = {
    "messages": "input: as a chat, messages",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "grammar": "text.format",
    **DRAFTING_FIELDS,
}


async def responses(request: Request) -> Response:
    body = await read_json(request, ResponsesRequest)
    server = request.app.state.server
    store: ResponseStore = server.responses
    owner = request.state.caller.name
    before = await asyncio.to_thread(_before, store, body, owner)
    offered = OfferedTools.of(body.tools)
    server.left_out.name_tools(request, offered.left_out)
    chat_body = await asyncio.to_thread(as_chat, body, before, offered)
    make = partial(_job, chat_body=chat_body, settings=server.settings, job_id=f"resp_{request.state.id}")
    with fields_named({**offered.renamed, **_FIELDS}):
        model, exchange = await admit(request, body.model, 1, make)
    blocks = exchange.result.choices[0].blocks
    given = [*before, *_items(body.input)]

    def keep(response: dict[str, Any]) -> None:
        store.keep(owner, response, given, made_items(blocks, offered))

    wanted = store.is_on and body.store is not False
    encoder = ResponsesEncoder(model, body, exchange.job, blocks, offered, keep if wanted else None)
    return exchange.stream(encoder) if body.stream else await exchange.whole(encoder)


def _job(model: Model, chat_body: chat.ChatRequest, settings: Settings, job_id: str) -> Job:
    return chat_job(model, chat_body, settings, job_id, "responses")


def _before(store: ResponseStore, body: ResponsesRequest, owner: str) -> list[Item]:
    """The conversation that the request goes on from."""
    if body.previous_response_id is None:
        return []
    return store.get(body.previous_response_id, owner, "previous_response_id").conversation()


def as_chat(
    body: ResponsesRequest, before: Sequence[Item] = (), offered: OfferedTools | None = None
) -> chat.ChatRequest:
    offered = offered or OfferedTools.of(body.tools)
    if body.n not in (None, 1):
        raise RequestError("n: a response has one output; remove it, or use /v1/chat/completions")
    if body.speculative is not None and body.speculative.trace:
        raise RequestError(
            "speculative.trace: only /v1/chat/completions and /v1/completions have it; remove it"
        )
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        choice = chat.NamedTool(type="function", function=chat.NamedFunction(name=choice.name))
    format = body.text.format if body.text is not None else None
    return chat.ChatRequest(
        messages=_messages(body, before, offered),
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        tools=offered.functions or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if format is None else _format(format),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        verbosity=body.text.verbosity if body.text is not None else None,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs,
        chat_template_kwargs=body.chat_template_kwargs,
        **{name: getattr(body, name) for name in Sampling.model_fields},
    )


def _items(given: str | list[Item]) -> list[Item]:
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else given


def made_items(blocks: Blocks, offered: OfferedTools) -> list[Item]:
    """What a response said, as items that could be sent back."""
    made: list[Item] = []
    for block in blocks:
        match block.type:
            case "reasoning":
                text = ReasoningText(type="reasoning_text", text=block.text)
                made.append(ReasoningItem(type="reasoning", content=[text]))
            case "text":
                made.append(MessageItem(role="assistant", content=block.text))
            case "call":
                origin = offered.origin(block.name)
                said = {"call_id": block.call_id, "name": origin.name, "namespace": origin.namespace}
                if origin.custom:
                    made.append(
                        CustomCallItem(type="custom_tool_call", input=custom_input(block.text), **said)
                    )
                else:
                    made.append(FunctionCallItem(type="function_call", arguments=block.text, **said))
    return made


def _messages(body: ResponsesRequest, before: Sequence[Item], offered: OfferedTools) -> list[chat.Message]:
    messages = _Messages(offered)
    if body.instructions:
        messages.add(chat.Message(role="system", content=body.instructions))
    for place, item in enumerate([*before, *_items(body.input)], start=-len(before)):
        messages.take(item, place)
    return messages.end()


class _Messages:
    """Makes chat messages of items. It joins what one turn of the assistant was split into, and the instructions at the
    beginning: most templates take one system message, first of all."""

    def __init__(self, offered: OfferedTools) -> None:
        self.done: list[chat.Message] = []
        self._offered = offered
        self._instructions: list[str] = []
        """What the first message is made of, if it is instructions."""

    def add(self, message: chat.Message) -> None:
        self.done.append(message)

    def end(self) -> list[chat.Message]:
        if self._instructions:
            self.done[0].content = "\n\n".join([str(self.done[0].content), *self._instructions])
        return self.done

    def take(self, item: Item, place: int) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._turn("content", "tool_calls").content = _content(item.content)
            case MessageItem(role="system" | "developer"):
                self._instruct(_text(item.content))
            case MessageItem():
                self.add(chat.Message(role=item.role, content=_content(item.content)))
            case ReasoningItem():
                self._think(item, place)
            case FunctionCallItem():
                self._call(item, item.arguments)
            case CustomCallItem():
                self._call(item, custom_arguments(item.input))
            case FunctionOutputItem():
                self.add(chat.Message(role="tool", tool_call_id=item.call_id, content=_content(item.output)))

    def _instruct(self, text: str) -> None:
        """Adds instructions to the conversation; those that come before anything else become one message."""
        if len(self.done) == 1 and self.done[0].role == "system":
            self._instructions.append(text)
        else:
            self.add(chat.Message(role="system", content=text))

    def _call(self, item: FunctionCallItem | CustomCallItem, arguments: str) -> None:
        turn = self._turn()
        name = self._offered.offered_name(item.name, item.namespace)
        function = chat.CalledFunction(name=name, arguments=arguments)
        turn.tool_calls = turn.tool_calls or []
        turn.tool_calls.append(chat.ToolCall(id=item.call_id, function=function))

    def _turn(self, *without: str) -> chat.Message:
        """The assistant's message that comes last, if it has none of the fields `without`; else a new one."""
        last = self.done[-1] if self.done else None
        if last is None or last.role != "assistant" or any(getattr(last, name) for name in without):
            self.add(chat.Message(role="assistant"))
        return self.done[-1]

    def _think(self, item: ReasoningItem, place: int) -> None:
        text = "\n".join(part.text for part in item.content or item.summary or ())
        if text:
            self._turn("reasoning_content", "content", "tool_calls").reasoning_content = text
        elif item.encrypted_content:
            raise RequestError(
                f"input[{place}].encrypted_content: only who encrypted it can read it; send content, or leave "
                "the item out"
            )


def _content(content: str | list[Part]) -> str | list[chat.Part]:
    if isinstance(content, str):
        return content
    texts = [part.text if isinstance(part, TextPart) else part.refusal for part in content]
    return [chat.Part(type="text", text=text) for text in texts]


def _text(content: str | list[Part]) -> str:
    parts = _content(content)
    return parts if isinstance(parts, str) else "".join(part.text or "" for part in parts)


def _format(format: Format) -> ResponseFormat:
    match format:
        case PlainFormat():
            return ResponseFormat(type=format.type)
        case JsonSchemaFormat():
            schema = JsonSchema(name=format.name, schema=format.schema_)
            return ResponseFormat(type="json_schema", json_schema=schema)
        case RegexFormat():
            return ResponseFormat(type="regex", pattern=format.pattern)
        case GrammarFormat():
            return ResponseFormat(type="grammar", grammar=format.grammar, syntax=format.syntax)
