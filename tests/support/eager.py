"""A server whose model is good at tools: it calls each one that it must, once, and then answers in a sentence.

The embedded model is not. So between the socket and the app, a request that offers tools gets a `tool_choice` that
names the next one to call, and one that is to be answered in words ends with the first sentence. All get a seed. What
is left to clients is their ordinary flow, and the real engine writes calls, answers and all.
"""

import json
from collections.abc import Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headlong.checkpoint.source import EMBEDDED
from headlong.text.tokenizer import Tokenizer
from support.serving import RunningServer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DEMANDS = ("required", "any")
RESULTS = ("function_call_output", "custom_tool_call_output")
MAX_TOKENS = 400
Body = dict[str, Any]


class EagerServer(RunningServer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bodies: list[tuple[str, Body]] = []
        """The paths and bodies as clients sent them."""
        tokenizer = Tokenizer.from_folder(EMBEDDED)
        assert tokenizer is not None
        quote = tokenizer.encode('"', add_special_tokens=False)[-1]
        self._ending = {str(quote): 6.0}

    def wrapped(self, app: ASGIApp) -> ASGIApp:
        async def eager(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            if scope["type"] != "http" or path not in (CHAT, RESPONSES, MESSAGES):
                return await app(scope, receive, send)
            body = await _read(receive)
            asked = json.loads(body)
            self.bodies.append((path, asked))
            body = json.dumps(self._changed(path, asked)).encode()
            headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
            headers.append((b"content-length", str(len(body)).encode()))
            whole = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def receive_changed() -> Message:
                return next(whole, None) or await receive()

            await app(scope | {"headers": headers}, receive_changed, send)

        return eager

    def _changed(self, path: str, asked: Body) -> Body:
        changed = {"seed": 7} | asked
        if path == CHAT:
            changed.setdefault("max_tokens", asked.get("max_completion_tokens") or MAX_TOKENS)
        elif path == RESPONSES:
            changed.setdefault("max_output_tokens", MAX_TOKENS)
        choice = asked.get("tool_choice") or "auto"
        kind = choice["type"] if isinstance(choice, dict) else choice
        offered, turns = list(_offered(asked)), _turns(asked)
        if offered and (kind in DEMANDS or (kind == "auto" and not turns)):
            if path != MESSAGES:
                changed |= {"parallel_tool_calls": False, "logit_bias": self._ending}
            return changed | {"tool_choice": _named(path, offered[min(turns, len(offered) - 1)])}
        if kind not in ("auto", "none"):
            return changed
        if _has_form(asked):
            return changed | ({"tool_choice": "none"} if offered and path != MESSAGES else {})
        return changed | ({"stop_sequences": [".", "\n"]} if path == MESSAGES else {"stop": [".", "\n"]})


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        part = await receive()
        body, more = body + part.get("body", b""), part.get("more_body", False)
    return body


def _offered(asked: Body) -> Iterator[str]:
    for tool in asked.get("tools") or ():
        name = (tool.get("function") or tool).get("name")
        if tool.get("type", "function") in ("function", "custom") and name is not None:
            yield name


def _turns(asked: Body) -> int:
    """How many turns the model has had, of which the n-th calls the n-th tool."""
    given = asked.get("messages") or asked.get("input")
    entries = given if isinstance(given, list) else []
    return sum(one.get("role") == "assistant" or one.get("type") in RESULTS for one in entries)


def _named(path: str, name: str) -> Body:
    if path == MESSAGES:
        return {"type": "tool", "name": name, "disable_parallel_tool_use": True}
    return (
        {"type": "function", "name": name}
        if path == RESPONSES
        else {"type": "function", "function": {"name": name}}
    )


def _has_form(asked: Body) -> bool:
    places = (asked, "response_format"), (asked.get("text"), "format"), (asked.get("output_config"), "format")
    forms = [place.get(name) for place, name in places if place]
    return any(form is not None and form["type"] != "text" for form in forms)
