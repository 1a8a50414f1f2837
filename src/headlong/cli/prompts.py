"""Prompts: those of a benchmark, built in or from a file, and the way of any to token ids."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headlong.errors import RequestError

if TYPE_CHECKING:
    from headlong.llm import LLM

Conversation = list[dict[str, Any]]

BUILT_IN = (
    "Write a short story about a shy dragon who learns to share.",
    "Explain to a child why the sky is blue.",
    "Give me five tips for growing tomatoes on a balcony.",
    "Write a poem about the sea in winter.",
    "Write a letter to a friend who moved to another city.",
    "Write a dialogue between a cat and a dog who share a house.",
)


def encode(llm: "LLM", prompt: str | Conversation, *, raw: bool) -> tuple[int, ...]:
    """Token ids; a text goes through the chat template where there is one, unless it is `raw`."""
    if not isinstance(prompt, str):
        return llm.text.encode_chat(prompt)
    if raw or llm.text.template is None:
        return llm.text.encode(prompt)
    return llm.text.encode_chat([{"role": "user", "content": prompt}])


def read_prompts(path: str | None) -> list[str | Conversation]:
    """One prompt per line of a text file; of a .jsonl file, the `prompt`, first of `turns`, or `messages`."""
    if path is None:
        return list(BUILT_IN)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompts {path}: cannot be read as text ({error})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if path.endswith(".jsonl"):
        prompts = [_parse(line, f"--prompts {path}, line {number}") for number, line in numbered]
    else:
        prompts: list[str | Conversation] = [line for _, line in numbered]
    if not prompts:
        raise RequestError(f"--prompts {path}: has no prompts; write one per line")
    return prompts


def _parse(line: str, where: str) -> str | Conversation:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where}: is not JSON ({error})") from error
    fields = entry if isinstance(entry, dict) else {}
    turns, messages = fields.get("turns"), fields.get("messages")
    prompt = turns[0] if isinstance(turns, list) and turns else fields.get("prompt")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return messages
    raise RequestError(f'{where}: needs "prompt" (a text), "turns" (texts) or "messages" (objects)')
