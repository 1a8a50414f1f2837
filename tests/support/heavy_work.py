"""Requests whose cost lies behind their validation: JSON and other languages inside of strings, very long
conversations, answers that take long to write down."""

import json
from collections.abc import Callable

from support.heavy_bodies import CHAT, COMPLETIONS, EMBEDDINGS, GOOD, MESSAGES, RESPONSES, SIZE, USER

Bodies = dict[str, tuple[str, Callable[[], str]]]


def _chat(**more: object) -> str:
    return json.dumps({"messages": json.loads(f"[{USER}]"), "max_tokens": 2} | more)


def _called(arguments: str, count: int = 1) -> str:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "assistant", "tool_calls": [call] * count},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    return json.dumps({"messages": [*json.loads(f"[{USER}]"), *turns], "max_tokens": 2})


def _filled(item: str, size: int = SIZE - 400) -> str:
    return item * (size // len(item))


_KEYS = {f"k{number:06}": 1 for number in range(40_000)}
STRINGS: Bodies = {
    "numbers in arguments": (CHAT, lambda: _called(f'{{"a":[{_filled("1,")}1]}}')),
    "lists in arguments": (CHAT, lambda: _called(f'{{"a":[{_filled("[],")}1]}}')),
    "objects in arguments": (CHAT, lambda: _called(f'{{"a":[{_filled("{},")}1]}}')),
    "keys in arguments": (
        CHAT,
        lambda: _called(json.dumps({f"k{number:06}": 1 for number in range(500_000)})),
    ),
    "long numbers in arguments": (CHAT, lambda: _called(f'{{"a":[{",".join(["1" * 4200] * 240)}]}}')),
    "nested arguments": (CHAT, lambda: _called(_filled("["))),
    "arguments of many calls": (CHAT, lambda: _called(f'{{"a":[{_filled("[],", 60_000)}1]}}', 128)),
    "arguments of an item": (
        RESPONSES,
        lambda: json.dumps(
            {
                "input": [
                    {
                        "type": "function_call",
                        "call_id": "c",
                        "name": "f",
                        "arguments": f"[{_filled('[],')}1]",
                    }
                ]
            }
        ),
    ),
    "a grammar of one word": (CHAT, lambda: _chat(structured_outputs={"grammar": _filled("a")})),
    "a grammar of lines": (
        CHAT,
        lambda: _chat(structured_outputs={"grammar": _filled("a \n", SIZE - SIZE // 3)}),
    ),
    "a duration": ("/api/chat", lambda: json.dumps({"model": "m", "keep_alive": _filled("1ms") + "x"})),
    "a duration of digits": (
        "/api/chat",
        lambda: json.dumps({"model": "m", "keep_alive": _filled("1") + "x"}),
    ),
    "numbers of thousands of digits": (
        CHAT,
        lambda: f'{{{GOOD},"bad_token_ids":[{_filled("1" * 4300 + ",")}1]}}',
    ),
    "numbers with many places": (
        CHAT,
        lambda: f'{{{GOOD},"bad_token_ids":[{_filled("0." + "1" * 700 + ",")}1]}}',
    ),
    "a number of millions of digits": (CHAT, lambda: f'{{{GOOD},"seed":{_filled("1")}}}'),
    "escaped letters": (
        CHAT,
        lambda: f'{{"messages":[{{"role":"user","content":"{_filled(chr(92) + "u00e9")}"}}]}}',
    ),
    "backslashes": (CHAT, lambda: f'{{"messages":[{{"role":"user","content":"{_filled(2 * chr(92))}"}}]}}'),
    "escaped quotes": (
        CHAT,
        lambda: f'{{"messages":[{{"role":"user","content":"{_filled(chr(92) + chr(34))}"}}]}}',
    ),
    "parts of blocks": (
        MESSAGES,
        lambda: json.dumps(
            {
                "max_tokens": 2,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 9_990}] * 2,
            }
        ),
    ),
    "thoughts": (
        MESSAGES,
        lambda: json.dumps(
            {
                "max_tokens": 2,
                "messages": [
                    *json.loads(f"[{USER}]"),
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x" * 700}] * 9_990},
                ],
            }
        ),
    ),
    "a tool of numbers": (
        CHAT,
        lambda: _chat(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": list(range(240_000))}}}]
        ),
    ),
    "instructions": (
        RESPONSES,
        lambda: json.dumps(
            {"input": [{"role": "system", "content": "x" * 700}] * 9_999, "max_output_tokens": 2}
        ),
    ),
    "items that are calls": (
        RESPONSES,
        lambda: json.dumps(
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 9_999}
        ),
    ),
    "items of a conversation": (RESPONSES, lambda: json.dumps({"input": json.loads(f"[{USER}]") * 9_999})),
    "long tokens": ("/detokenize", lambda: json.dumps({"tokens": [5] * 1_000_000})),
}
"""None of them is answered with a 200."""

ANSWERS: Bodies = {
    "vectors": (EMBEDDINGS, lambda: json.dumps({"input": ["a"] * 2048})),
    "a prompt's log-probabilities": (
        COMPLETIONS,
        lambda: json.dumps({"prompt": ["a b c d " * 400] * 5, "prompt_logprobs": 20, "max_tokens": 1}),
    ),
    "an echo's log-probabilities": (
        COMPLETIONS,
        lambda: json.dumps({"prompt": ["a b c d " * 400] * 5, "echo": True, "logprobs": 20, "max_tokens": 1}),
    ),
    "log-probabilities": (
        CHAT,
        lambda: _chat(max_tokens=1500, ignore_eos=True, logprobs=True, top_logprobs=20, n=4),
    ),
    "log-probabilities of a response": (
        RESPONSES,
        lambda: json.dumps(
            {"input": "Hi", "max_output_tokens": 2000, "ignore_eos": True, "top_logprobs": 20}
        ),
    ),
    "log-probabilities of a streamed response": (
        RESPONSES,
        lambda: json.dumps(
            {"input": "Hi", "max_output_tokens": 2000, "ignore_eos": True, "top_logprobs": 20, "stream": True}
        ),
    ),
    "tools that come back": (
        RESPONSES,
        lambda: json.dumps(
            {
                "input": "Hi",
                "tools": [{"type": "function", "name": "f", "parameters": _KEYS}],
                "tool_choice": "none",
                "max_output_tokens": 2,
                "stream": True,
            }
        ),
    ),
    "metadata that come back": (
        RESPONSES,
        lambda: json.dumps(
            {"input": "Hi", "metadata": dict.fromkeys(list(_KEYS)[:1000], "x" * 7000), "max_output_tokens": 2}
        ),
    ),
}
"""These are answered with a 200."""
