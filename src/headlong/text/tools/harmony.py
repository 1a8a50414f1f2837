"""Calls as gpt-oss writes them: messages to a function, with the arguments as their text. Only the writing is here.

Which messages an output has, and so also how calls are read, is the affair of `headlong.text.harmony`. A call ends the
output, so that there is one at most, and what the model thinks before it is part of the form.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from headlong.text.tools.rules import CallForm, Rules, headed_rules, literal, without

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
MARKUP = (START, CHANNEL, CONSTRAIN, MESSAGE, END)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
NEXT = f"{END}{START}assistant"
FUNCTIONS = "functions."


def thought_rules() -> Rules:
    """The rule `thoughts`: the messages in which the model thinks before it answers, if there are any."""
    return {
        "thoughts": "thought*",
        "thought": f"{literal(ANALYSIS)} thinking {literal(NEXT.removeprefix(END))}",
        "thinking[lazy]": "THINKING",
        "THINKING": f"(/(?s:.*)/ & {without(START, CHANNEL)}) {literal(END)}",
    }


def _head(name: str) -> str:
    return literal(f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}")


FORM = CallForm(headed_rules(_head), parallel=False, first="thoughts", more=thought_rules())


def with_single_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as gpt-oss's template can write them: one call to a message, each followed by its result, and no
    text beside what was thought before a call."""
    changed: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls")
        if not calls:
            changed.append(dict(message))
            continue
        results = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        changed += _one_by_one(_thinking_aloud(message), results)
    return changed


def _one_by_one(message: dict[str, Any], results: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    order = {call.get("id"): rank for rank, call in enumerate(message["tool_calls"])}
    results = sorted(results, key=lambda result: order.get(result.get("tool_call_id"), len(order)))
    pairs = []
    for number, (call, result) in enumerate(zip_longest(message["tool_calls"], results)):
        if call is not None:
            first = message if number == 0 else {"role": message["role"], "content": ""}
            pairs.append({**first, "tool_calls": [call]})
        if result is not None:
            pairs.append(dict(result))
    return pairs


def _thinking_aloud(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its text added to what was thought, where it has both."""
    names = [name for name in ("reasoning_content", "thinking", "reasoning") if message.get(name)]
    if not names or not message.get("content"):
        return dict(message)
    return {**message, "content": "", names[0]: f"{message[names[0]]}\n{message['content']}"}
