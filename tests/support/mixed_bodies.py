"""Requests of many kinds over HTTP, and what a client can see of their answers, however it was streamed."""

import json
from collections.abc import Iterable
from typing import Any

import httpx

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds a thing.",
            "parameters": {
                "type": "object",
                "properties": {
                    "what": {"type": "string", "maxLength": 24},
                    "count": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["what", "count"],
                "additionalProperties": False,
            },
        },
    }
]
SHAPE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 16}, "ages": {"type": "array", "maxItems": 6}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
OPENINGS = (
    "Once upon a time",
    "The dog ran to the park and",
    "Tim and Mia found a red boat.",
    "One day, a girl named Lily",
)
Body = dict[str, Any]


def bodies(count: int, length: int) -> list[tuple[str, Body]]:
    """Paths and bodies, all with a seed of their own; answers have at most `length` tokens."""
    kinds = (_story, _chat, _tools, _schema, _several, _stopped, _penalised, _whole)
    return [kinds[number % len(kinds)](number, length) for number in range(count)]


def seen(answer: httpx.Response) -> Any:
    """What the client sees of an answer: each choice's texts, calls and log-probabilities, and usage."""
    assert answer.status_code == 200, (answer.status_code, answer.read())
    if not answer.headers["content-type"].startswith("text/event-stream"):
        answer.read()
        return gathered([answer.json()])
    return gathered(events(answer.iter_lines()))


def events(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    """The objects of a stream of server-sent events, which must end as it should."""
    ended = False
    for line in lines:
        if line == "data: [DONE]":
            ended = True
        elif line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    assert ended, "the stream broke off"


def gathered(parts: Iterable[dict[str, Any]]) -> Any:
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for part in parts:
        assert "error" not in part, part
        if part.get("usage"):
            usage = part["usage"]["prompt_tokens"], part["usage"]["completion_tokens"]
        for choice in part["choices"]:
            own = choices.setdefault(choice["index"], {"text": "", "calls": {}, "logprobs": [], "end": None})
            _add(own, choice)
    return choices, usage


def _add(own: dict[str, Any], choice: dict[str, Any]) -> None:
    message = choice.get("delta") or choice.get("message") or {}
    own["text"] += message.get("content") or choice.get("text") or ""
    for number, call in enumerate(message.get("tool_calls") or ()):
        place = own["calls"].setdefault(call.get("index", number), ["", ""])
        place[0] += call["function"].get("name") or ""
        place[1] += call["function"].get("arguments") or ""
    logprobs = choice.get("logprobs") or {}
    own["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
    own["end"] = choice.get("finish_reason") or own["end"]


def _sampled(number: int, length: int) -> Body:
    return {"seed": number, "temperature": 0.9, "top_p": 0.95, "max_tokens": length} | _streamed()


def _streamed() -> Body:
    return {"stream": True, "stream_options": {"include_usage": True}}


def _prompt(number: int) -> str:
    return OPENINGS[number % len(OPENINGS)]


def _messages(number: int) -> list[Body]:
    return [{"role": "user", "content": f"Tell me more: {_prompt(number)}"}]


def _story(number: int, length: int) -> tuple[str, Body]:
    return "/v1/completions", {"prompt": _prompt(number), "ignore_eos": True} | _sampled(number, length)


def _chat(number: int, length: int) -> tuple[str, Body]:
    return "/v1/chat/completions", {
        "messages": _messages(number),
        "logprobs": True,
        "top_logprobs": 2,
    } | _sampled(number, length)


def _tools(number: int, length: int) -> tuple[str, Body]:
    return "/v1/chat/completions", {
        "messages": _messages(number),
        "tools": TOOLS,
        "tool_choice": "required",
    } | _sampled(number, max(length, 96))


def _schema(number: int, length: int) -> tuple[str, Body]:
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": SHAPE, "strict": True}}
    return "/v1/chat/completions", {
        "messages": _messages(number),
        "response_format": form,
    } | _sampled(number, length)


def _several(number: int, length: int) -> tuple[str, Body]:
    return "/v1/completions", {
        "prompt": [_prompt(number), _prompt(number + 1)],
        "n": 2,
        "logprobs": 1,
    } | _sampled(number, length)


def _stopped(number: int, length: int) -> tuple[str, Body]:
    stops = {"stop": [". The", "\n\n"], "min_tokens": 5}
    return "/v1/completions", {"prompt": _prompt(number)} | stops | _sampled(number, length)


def _penalised(number: int, length: int) -> tuple[str, Body]:
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    body = {"prompt": _prompt(number), "max_tokens": length, "ignore_eos": True, "temperature": 0.0}
    return "/v1/completions", body | penalties | _streamed()


def _whole(number: int, length: int) -> tuple[str, Body]:
    body = {"messages": _messages(number), "n": 2, "logprobs": True} | _sampled(number, length)
    return "/v1/chat/completions", body | {"stream": False, "stream_options": None}
