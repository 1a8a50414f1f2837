"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's chat.

Translates the body into a `ChatRequest`; `messages_encoder` says the answer.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from headlong.errors import RequestError
from headlong.server.admission import admit
from headlong.server.body import read_json
from headlong.server.generation import Job
from headlong.server.messages_encoder import MessagesEncoder
from headlong.server.model import Model
from headlong.server.prompting import DRAFTING_FIELDS, chat_job, render
from headlong.server.renaming import fields_named
from headlong.server.reply import JsonReply
from headlong.server.schemas import chat
from headlong.server.schemas.base import JsonSchema, ResponseFormat
from headlong.server.schemas.messages import (
    Block,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    OwnTool,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from headlong.server.settings import Settings

_FIELDS = {
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "response_format": "output_config.format",
    "grammar": "output_config.format",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    **DRAFTING_FIELDS,
}


async def messages(request: Request) -> Response:
    body = await read_json(request, MessagesRequest)
    settings = request.app.state.server.settings
    make = partial(_job, body=body, settings=settings, job_id=f"msg_{request.state.id}")
    with fields_named(_FIELDS):
        model, exchange = await admit(request, body.model, 1, make)
    encoder = MessagesEncoder(model, body, exchange.job, request.state.id)
    return exchange.stream(encoder) if body.stream else await exchange.whole(encoder)


async def count_tokens(request: Request) -> Response:
    """Answers how many tokens `/v1/messages` would read."""
    body = await read_json(request, CountTokensRequest)
    pool, admin = request.app.state.server.pool, request.state.caller.admin
    async with pool.lease(body.model, admin=admin) as model:
        with fields_named(_FIELDS):
            prompted = await asyncio.to_thread(lambda: render(model, chat.ChatRequest(**_prompt(body))))
    return JsonReply({"input_tokens": len(prompted.tokens)})


def _job(model: Model, body: MessagesRequest, settings: Settings, job_id: str) -> Job:
    return chat_job(model, as_chat(body), settings, job_id, "messages")


def as_chat(body: MessagesRequest) -> chat.ChatRequest:
    prompt, thinking = _prompt(body), body.thinking
    if body.speculative is not None and body.speculative.trace:
        raise RequestError(
            "speculative.trace: only /v1/chat/completions and /v1/completions have it; remove it"
        )
    if (
        thinking is not None
        and thinking.budget_tokens is not None
        and thinking.budget_tokens >= body.max_tokens
    ):
        raise RequestError(
            "thinking.budget_tokens: must be below max_tokens, which is for thinking and answer"
        )
    return chat.ChatRequest(
        **prompt,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        speculative=body.speculative,
    )


def _prompt(body: CountTokensRequest) -> dict[str, Any]:
    """The fields of a chat request that decide its prompt and the form of its output."""
    listed = [message for place, one in enumerate(body.messages) for message in _messages(one, place)]
    if body.system:
        texts = (
            [_part(body.system)] if isinstance(body.system, str) else [_part(one.text) for one in body.system]
        )
        listed.insert(0, chat.Message(role="system", content=texts))
    choice, config = body.tool_choice, body.output_config
    form = None
    if config is not None and config.format is not None:
        form = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=config.format.schema_))
    return {
        "messages": listed,
        "continue_final_message": body.messages[-1].role == "assistant",
        "model": body.model,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
        "response_format": form,
        "chat_template_kwargs": _variables(body),
    }


def _messages(message: InputMessage, place: int) -> list[chat.Message]:
    """Translates Anthropic's messages into chat messages. One that holds the results of tools becomes several."""
    if isinstance(message.content, str):
        return [chat.Message(role=message.role, content=message.content)]
    if message.role == "assistant":
        return [_turn(message.content, f"messages[{place}]")]
    return _told(message.role, message.content, f"messages[{place}]")


def _turn(blocks: Sequence[Block], origin: str) -> chat.Message:
    """Makes a chat message of an assistant's turn: what it thought, said and called, each joined."""
    texts: list[chat.Part] = []
    thoughts: list[str] = []
    calls: list[chat.ToolCall] = []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(_part(block.text))
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = chat.CalledFunction(name=block.name, arguments=block.input)
                calls.append(chat.ToolCall(id=block.id, function=function))
            case ToolResultBlock():
                raise RequestError(
                    f"{origin}.content[{number}]: a tool_result is the user's, not the assistant's"
                )
    return chat.Message(
        role="assistant",
        content=texts or None,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _told(role: Literal["user", "system"], blocks: Sequence[Block], origin: str) -> list[chat.Message]:
    """Makes chat messages of a user's texts and results of tools, in their order."""
    listed: list[chat.Message] = []
    texts: list[chat.Part] = []

    def flush() -> None:
        if texts:
            listed.append(chat.Message(role=role, content=list(texts)))
            texts.clear()

    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(_part(block.text))
            case ToolResultBlock() if role == "user":
                flush()
                listed.append(_result(block))
            case _:
                raise RequestError(f"{origin}.content[{number}]: a {block.type} is not the {role}'s; move it")
    flush()
    return listed


def _result(block: ToolResultBlock) -> chat.Message:
    """Makes a chat message of a tool's result. Chat templates have no word for a failure, so the text says it."""
    parts = [_part("Error: ")] if block.is_error else []
    if isinstance(block.content, str):
        parts.append(_part(block.content))
    else:
        parts += [_part(one.text) for one in block.content or ()]
    return chat.Message(role="tool", tool_call_id=block.tool_use_id, content=parts)


def _part(text: str) -> chat.Part:
    return chat.Part(type="text", text=text)


def _tool(tool: OwnTool) -> chat.Tool:
    function = chat.Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return chat.Tool(type="function", function=function)


def _choice(choice: ToolChoice) -> chat.NamedTool | str:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise RequestError("tool_choice.name: is missing; type 'tool' needs it")
    return chat.NamedTool(type="function", function=chat.NamedFunction(name=choice.name))


def _variables(body: CountTokensRequest) -> dict[str, Any]:
    """What the template is told of thinking. A client that does not speak of it expects none."""
    thinking, config = body.thinking, body.output_config
    variables: dict[str, Any] = {"enable_thinking": thinking is not None and thinking.type != "disabled"}
    if thinking is not None and thinking.budget_tokens is not None:
        if thinking.type != "enabled":
            raise RequestError("thinking.budget_tokens: goes with type 'enabled' alone; remove it")
        variables["thinking_budget"] = thinking.budget_tokens
    if config is not None and config.effort is not None:
        variables["reasoning_effort"] = config.effort
    return variables | (body.chat_template_kwargs or {})
