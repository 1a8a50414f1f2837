"""`/api/chat` and `/api/generate`: Ollama's endpoints that generate.

Translates their bodies into a `ChatRequest`, or into a prompt as it is; `ollama_encoder` says the answer. Without a
prompt both load or unload a model, as Ollama's do.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headlong.errors import RequestError
from headlong.server.admission import admit
from headlong.server.body import read_json
from headlong.server.generation import Job
from headlong.server.model import Model
from headlong.server.ollama_encoder import NDJSON, ChatLines, GenerateLines, Lines, head
from headlong.server.ollama_names import served_name
from headlong.server.pool import ModelPool
from headlong.server.prompting import (
    DRAFTING_FIELDS,
    chat_job,
    check_drafting,
    output_tokens,
    requested_grammar,
)
from headlong.server.renaming import fields_named
from headlong.server.reply import JsonReply
from headlong.server.schemas import chat
from headlong.server.schemas.base import JsonSchema, ResponseFormat
from headlong.server.schemas.ollama import GenerateRequest, Generating, Message, OllamaChatRequest, Tool
from headlong.server.settings import Settings

_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_FIELDS = {
    **{name: f"options.{name}" for name in _OPTIONS},
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "grammar": "format",
    **DRAFTING_FIELDS,
}


async def ollama_chat(request: Request) -> Response:
    body = await read_json(request, OllamaChatRequest)
    if not body.messages:
        return await _load_or_unload(request, body, {"message": {"role": "assistant", "content": ""}})
    return await _answer(request, body, _chat_job, ChatLines)


async def ollama_generate(request: Request) -> Response:
    body = await read_json(request, GenerateRequest)
    if not body.prompt:
        return await _load_or_unload(request, body, {"response": ""})
    return await _answer(request, body, _generate_job, GenerateLines)


async def _answer(request: Request, body: Any, make: Any, lines: type[Lines]) -> Response:
    server, began = request.app.state.server, time.perf_counter()
    make_job = partial(make, body=body, settings=server.settings, job_id=request.state.id)
    with fields_named(_FIELDS):
        model, exchange = await admit(request, served_name(server.pool, body.model), 1, make_job)
    encoder = lines(model, body, exchange, began)
    return exchange.stream(encoder, NDJSON) if body.stream else await exchange.whole(encoder)


async def _load_or_unload(request: Request, body: Generating, empty: Mapping[str, Any]) -> Response:
    """Answers a request without a prompt. A model that serves is there already; else an admin loads it."""
    server, caller = request.app.state.server, request.state.caller
    pool: ModelPool = server.pool
    name = served_name(pool, body.model)
    if body.unloads:
        server.auth.require_admin(caller)
        pool.unload(name)
    elif pool.find(name) is None:
        if not caller.admin:
            raise pool.not_found(name)
        await pool.load(name)
    done = {"done": True, "done_reason": "unload" if body.unloads else "load"}
    return JsonReply(head(body.model) | dict(empty) | done)


def _chat_job(model: Model, body: OllamaChatRequest, settings: Settings, job_id: str) -> Job:
    messages = [_message(one) for one in body.messages]
    tools = [_tool(tool) for tool in body.tools] if body.tools else None
    return chat_job(model, _as_chat(model, body, messages, tools), settings, job_id, "api/chat")


def _generate_job(model: Model, body: GenerateRequest, settings: Settings, job_id: str) -> Job:
    if body.raw:
        return _raw_job(model, body, settings, job_id)
    messages = [chat.Message(role="user", content=body.prompt)]
    if body.system:
        messages.insert(0, chat.Message(role="system", content=body.system))
    asked = _as_chat(model, body, messages, None)
    return chat_job(model, asked, settings, job_id, "api/generate", before=_context(model, body))


def _raw_job(model: Model, body: GenerateRequest, settings: Settings, job_id: str) -> Job:
    """A prompt that goes to the model as it is, and an answer that is not parsed."""
    for name in ("system", "context", "think"):
        if getattr(body, name):
            raise RequestError(f"{name}: does not go with raw, which takes the prompt as it is; remove one")
    prompt = model.client.text.encode(body.prompt)
    asked = _as_chat(model, body, [chat.Message(role="user", content="")], None)
    params = asked.params(
        model.sampling,
        max_tokens=output_tokens(model, settings, len(prompt), asked.max_tokens),
        logprobs=asked.wants_logprobs,
        grammar=requested_grammar(asked, asked.response_format),
    )
    check_drafting(model, asked)
    return Job(job_id, "api/generate", (prompt,), params)


def _context(model: Model, body: GenerateRequest) -> tuple[int, ...]:
    tokenizer = model.client.text.tokenizer
    for place, token in enumerate(body.context or ()):
        if tokenizer is None or not tokenizer.is_known(token):
            raise RequestError(f"context[{place}]: {token} is no token of this model; send its own context")
    return tuple(body.context or ())


def _as_chat(
    model: Model,
    body: Generating,
    messages: list[chat.Message],
    tools: list[chat.Tool] | None,
) -> chat.ChatRequest:
    sampling = body.options.sampling()
    _check_window(body, dict(model.sampling))
    if body.think and model.format.reasoning is None:
        raise RequestError(f"think: {body.model!r} does not support thinking; leave it out or send false")
    variables = {"enable_thinking": body.think} if isinstance(body.think, bool) else None
    return chat.ChatRequest(
        **sampling,
        messages=messages,
        tools=tools,
        response_format=_form(body),
        chat_template_kwargs=variables,
        reasoning_effort=body.think if isinstance(body.think, str) else None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        speculative=body.speculative,
    )


def _check_window(body: Generating, defaults: Mapping[str, Any]) -> None:
    """Refuses a penalty over the last tokens alone; without a penalty there is nothing to look back for."""
    options = body.options
    names = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    by_default = any(defaults.get(name, none) != none for name, none in names.items())
    if (options.penalises or by_default) and options.repeat_last_n not in (None, 0, -1):
        raise RequestError(
            "options.repeat_last_n: penalties look at the whole text here; send -1, or 0 for none"
        )


def _form(body: Generating) -> ResponseFormat | None:
    if isinstance(body.format, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=body.format))
    return ResponseFormat(type="json_object") if body.format else None


def _message(message: Message) -> chat.Message:
    calls = [
        chat.ToolCall(
            id=call.id,
            function=chat.CalledFunction(name=call.function.name, arguments=call.function.arguments),
        )
        for call in message.tool_calls or ()
    ]
    return chat.Message(
        role=message.role,
        content=message.content or "",
        reasoning_content=message.thinking or None,
        tool_calls=calls or None,
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
    )


def _tool(tool: Tool) -> chat.Tool:
    return chat.Tool(type="function", function=tool.function)
