"""Request bodies of just under 8 MiB that cost far more to read than to send: one of each kind for every endpoint."""

import json
from collections.abc import Callable

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
USER = '{"role":"user","content":"Hi"}'
GOOD = f'"messages":[{USER}],"max_tokens":2'
SIZE = (8 << 20) - 4096


def _repeat(item: str, joint: str = ",") -> str:
    return joint.join([item] * (SIZE // (len(item) + len(joint))))


def _keys() -> str:
    return ",".join(f'"k{number:06}":1' for number in range(SIZE // 13))


LISTS: dict[str, tuple[str, Callable[[], str]]] = {
    "banned tokens": (CHAT, lambda: f'{{{GOOD},"bad_token_ids":[{_repeat("-1")}]}}'),
    "banned strings": (CHAT, lambda: f'{{{GOOD},"banned_strings":[{_repeat(json.dumps("ab"))}]}}'),
    "stop strings": (CHAT, lambda: f'{{{GOOD},"stop":[{_repeat(json.dumps("ab"))}]}}'),
    "stop tokens": (CHAT, lambda: f'{{{GOOD},"stop_token_ids":[{_repeat("-1")}]}}'),
    "biases": (CHAT, lambda: f'{{{GOOD},"logit_bias":{{{_keys()}}}}}'),
    "unknown keys": (CHAT, lambda: f"{{{GOOD},{_keys()}}}"),
    "messages": (CHAT, lambda: f'{{"messages":[{_repeat("{}")}]}}'),
    "parts": (CHAT, lambda: f'{{"messages":[{{"role":"user","content":[{_repeat("""{"type":0}""")}]}}]}}'),
    "tools": (CHAT, lambda: f'{{{GOOD},"tools":[{_repeat("{}")}]}}'),
    "choices": (CHAT, lambda: f'{{{GOOD},"structured_outputs":{{"choice":[{_repeat(json.dumps("a"))}]}}}}'),
    "template variables": (CHAT, lambda: f'{{{GOOD},"chat_template_kwargs":{{{_keys()}}}}}'),
    "schema": (
        CHAT,
        lambda: (
            f'{{{GOOD},"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{{{_keys()}}}}}}}}}'
        ),
    ),
    "empty lists": (CHAT, lambda: f'{{"messages":[{_repeat("[]")}]}}'),
    "nesting": (CHAT, lambda: '{"messages":' + "[" * SIZE),
    "ids": (COMPLETIONS, lambda: f'{{"prompt":[{_repeat("-1")}]}}'),
    "lists of ids": (COMPLETIONS, lambda: f'{{"prompt":[{_repeat("[-1]")}]}}'),
    "blocks": (
        MESSAGES,
        lambda: f'{{"max_tokens":2,"messages":[{{"role":"user","content":[{_repeat("""{"type":0}""")}]}}]}}',
    ),
    "system blocks": (MESSAGES, lambda: f'{{"max_tokens":2,"messages":[{USER}],"system":[{_repeat("{}")}]}}'),
    "items": (RESPONSES, lambda: f'{{"input":[{_repeat("{}")}]}}'),
    "metadata": (RESPONSES, lambda: f'{{"input":"Hi","metadata":{{{_keys()}}}}}'),
    "inputs": (EMBEDDINGS, lambda: f'{{"input":[{_repeat(json.dumps("ab"))}]}}'),
    "context": ("/api/generate", lambda: f'{{"prompt":"Hi","model":"m","context":[{_repeat("-1")}]}}'),
    "images": (
        "/api/chat",
        lambda: f'{{"model":"m","messages":[{{"role":"user","content":"Hi","images":[{_repeat("1")}]}}]}}',
    ),
    "tokens": ("/v1/token/decode", lambda: f'{{"tokens":[{_repeat("-1")}]}}'),
    "tokens as text": ("/detokenize", lambda: f'{{"tokens":[{_repeat("-1")}]}}'),
}
"""Very many values; each of them is one too many for some field."""

_TEXT: dict[str, str] = {"letters": "a", "words": "hello, world. "}
TEXTS: dict[str, tuple[str, Callable[..., str]]] = {
    f"{name} to {path}": (
        path,
        lambda size=SIZE, form=form, piece=piece: form % json.dumps(piece * (size // len(piece))),
    )
    for path, form in {
        CHAT: '{"messages":[{"role":"user","content":%s}]}',
        COMPLETIONS: '{"prompt":%s}',
        MESSAGES: '{"max_tokens":2,"messages":[{"role":"user","content":%s}]}',
        f"{MESSAGES}/count_tokens": '{"messages":[{"role":"user","content":%s}]}',
        RESPONSES: '{"input":%s}',
        EMBEDDINGS: '{"input":%s}',
        "/v1/token/encode": '{"text":%s}',
        "/tokenize": '{"prompt":%s}',
        "/api/generate": '{"model":"tale-20m","raw":true,"prompt":%s}',
        "/api/chat": '{"model":"tale-20m","messages":[{"role":"user","content":%s}]}',
    }.items()
    for name, piece in _TEXT.items()
}
"""Texts that fit no context."""

AT_THE_BOUNDS: dict[str, tuple[str, Callable[[], str]]] = {
    "a million ids": (COMPLETIONS, lambda: f'{{"prompt":[{",".join(["1"] * ((1 << 20) - 1))}]}}'),
    "ids to decode": ("/v1/token/decode", lambda: f'{{"tokens":[{",".join(["-1"] * (1 << 20))}]}}'),
    "banned token ids": (CHAT, lambda: f'{{{GOOD},"bad_token_ids":[{",".join(["9"] * 65_000)}],"n":-1}}'),
    "parts of messages": (
        CHAT,
        lambda: (
            f'{{"messages":[{",".join([_message(5_000)] * 3)},{{"role":"user","content":"{"a" * 100_000}"}}]}}'
        ),
    ),
    "messages of a conversation": (CHAT, lambda: f'{{"messages":[{",".join([USER] * 10_000)}]}}'),
    "keys of a schema": (
        CHAT,
        lambda: (
            f'{{{GOOD},"response_format":{{"type":"json_schema","json_schema":{{"schema":{{{_some_keys()}}}}}}}}}'
        ),
    ),
    "keys of a tool": (
        CHAT,
        lambda: (
            f'{{{GOOD},"tools":[{{"type":"function","function":{{"name":"f","parameters":{{{_some_keys()}}}}}}}]}}'
        ),
    ),
    "keys of variables": (CHAT, lambda: f'{{{GOOD},"chat_template_kwargs":{{{_some_keys()}}},"n":-1}}'),
}
"""As much of each kind as is read, with a fault that is found late."""


def _message(num_parts: int) -> str:
    parts = ",".join(['{"type":"text","text":"x"}'] * num_parts)
    return f'{{"role":"user","content":[{parts}]}}'


def _some_keys() -> str:
    return ",".join(f'"k{number:06}":1' for number in range(50_000))


def _held(tokens: int, **grammar: object) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens} | grammar)


_AMBIGUOUS = "start: s\ns: /[a-z ,.]/ | s s | s s s"
_WINDOW = "(?:[a-z ,]*[aeiou][a-z ,]{18}[mnop][a-z ,]{9})*"
SLOW_GRAMMARS: dict[str, tuple[str, Callable[[], str]]] = {
    "a grammar of many readings": (
        CHAT,
        lambda: _held(200, structured_outputs={"grammar": _AMBIGUOUS}, speculative={"mtp": "off"}),
    ),
    "a grammar of many readings, drafted": (
        CHAT,
        lambda: _held(200, structured_outputs={"grammar": _AMBIGUOUS}, speculative={"mtp": 3}),
    ),
    "an expression with many states": (CHAT, lambda: _held(120, structured_outputs={"regex": _WINDOW})),
    "intersections": (
        CHAT,
        lambda: _held(
            50,
            structured_outputs={
                "grammar": "start: A\nA: /([ab]{101})*/ & /([ab]{103})*/ & /([ab]{107})*/ & /([ab]{109})*/"
            },
        ),
    ),
    "a schema of patterns": (
        CHAT,
        lambda: _held(
            120,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "schema": {
                        "type": "object",
                        "required": ["a"],
                        "properties": {"a": {"type": "string", "pattern": _WINDOW}},
                    },
                },
            },
        ),
    ),
}
"""Grammars that take long to compile or to follow."""
