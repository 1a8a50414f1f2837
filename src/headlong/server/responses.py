"""`/v1/responses`: OpenAI's newer chat, as far as it goes without storing anything.

Translates the body into a `ChatRequest`; `responses_encoder` says the answer.
"""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from headlong.errors import RequestError
from headlong.server.admission import admit
from headlong.server.body import read_json
from headlong.server.generation import Job
from headlong.server.model import Model
from headlong.server.prompting import DRAFTING_FIELDS, chat_job
from headlong.server.renaming import fields_named
from headlong.server.responses_encoder import ResponsesEncoder
from headlong.server.schemas import chat
from headlong.server.schemas.base import JsonSchema, ResponseFormat, Sampling
from headlong.server.schemas.responses import (
    Format,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    GrammarFormat,
    Item,
    JsonSchemaFormat,
    MessageItem,
    NamedTool,
    Part,
    PlainFormat,
    ReasoningItem,
    RegexFormat,
    ResponsesRequest,
    TextPart,
)
from headlong.server.settings import Settings

_FIELDS = {
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "messages": "input: as a chat, messages",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "grammar": "text.format",
    **DRAFTING_FIELDS,
}


async def responses(request: Request) -> Response:
    body = await read_json(request, ResponsesRequest)
    settings = request.app.state.server.settings
    make = partial(_job, body=body, settings=settings, job_id=f"resp_{request.state.id}")
    with fields_named(_FIELDS):
        model, exchange = await admit(request, body.model, 1, make)
    encoder = ResponsesEncoder(model, body, exchange.job, exchange.result.choices[0].blocks)
    return exchange.stream(encoder) if body.stream else await exchange.whole(encoder)


def _job(model: Model, body: ResponsesRequest, settings: Settings, job_id: str) -> Job:
    return chat_job(model, as_chat(body), settings, job_id, "responses")


def as_chat(body: ResponsesRequest) -> chat.ChatRequest:
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
        messages=_messages(body),
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
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


def _messages(body: ResponsesRequest) -> list[chat.Message]:
    messages = _Messages()
    if body.instructions:
        messages.add(chat.Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.add(chat.Message(role="user", content=body.input))
    else:
        for place, item in enumerate(body.input):
            messages.take(item, place)
    return messages.done


class _Messages:
    """Puts together again what one turn of the assistant was split into."""

    def __init__(self) -> None:
        self.done: list[chat.Message] = []

    def add(self, message: chat.Message) -> None:
        self.done.append(message)

    def take(self, item: Item, place: int) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._turn("content", "tool_calls").content = _content(item.content)
            case MessageItem():
                self.add(chat.Message(role=item.role, content=_content(item.content)))
            case ReasoningItem():
                self._think(item, place)
            case FunctionCallItem():
                turn = self._turn()
                function = chat.CalledFunction(name=item.name, arguments=item.arguments)
                turn.tool_calls = [
                    *(turn.tool_calls or ()),
                    chat.ToolCall(id=item.call_id, function=function),
                ]
            case FunctionOutputItem():
                self.add(chat.Message(role="tool", tool_call_id=item.call_id, content=_content(item.output)))

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


def _tool(tool: FunctionTool) -> chat.Tool:
    function = chat.Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return chat.Tool(type="function", function=function)


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
