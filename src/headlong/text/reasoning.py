"""Splits a model's reasoning from its answer, as the text comes.

The reasoning stands at the beginning of the output, between two markers; a template may have written
the first one into the prompt already. White space next to a marker belongs to neither text. Knows
nothing of tool calls: what it calls the answer may still hold them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headlong.text.events import WHITE, begun_len
from headlong.text.tools.harmony import ANALYSIS, END


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around the reasoning."""

    start: str
    end: str
    name: str = "think"

    def opened_by(self, prompt_text: str) -> bool:
        """Whether a prompt leaves the reasoning open. Only its very end counts: further up, a marker may be
        what a user wrote."""
        return prompt_text.rstrip(WHITE).endswith(self.start)


THINK = ReasoningFormat("<think>", "</think>")
MISTRAL = ReasoningFormat("[THINK]", "[/THINK]", "mistral")
HARMONY = ReasoningFormat(ANALYSIS, END, "harmony")
"""Where `headlong.text.harmony` reads the output, these say where its reasoning is."""


class Part(NamedTuple):
    """A piece of the reasoning or of the answer."""

    is_reasoning: bool
    text: str


class ReasoningSplitter:
    """Reads one output. `inside`: the prompt has opened the reasoning.

    Only what may still become a marker is held back, and white space that a marker may follow.
    Reasoning that the output does not close stays reasoning; a marker anywhere but at the beginning
    of the output is ordinary text.
    """

    def __init__(self, format: ReasoningFormat, inside: bool):
        self._format = format
        self._held = ""
        self._final = False
        self._space: list[str] = []
        self._begun = False  # some reasoning was given out, so that white space is inside it
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._in_reasoning if inside else self._at_start

    def push(self, text: str) -> list[Part]:
        """Take the next piece of output; return what is settled by it."""
        self._held += text
        return self._run()

    def finish(self) -> list[Part]:
        """The output is over: return what was held."""
        self._final = True
        return self._run()

    def _run(self) -> list[Part]:
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def _at_start(self) -> bool:
        rest = self._held.lstrip(WHITE)
        self._space.append(self._held[: len(self._held) - len(rest)])
        start = self._format.start
        if rest.startswith(start):
            self._held = rest[len(start) :]
            self._space.clear()
            self._state = self._in_reasoning
            return True
        if start.startswith(rest) and not self._final:
            self._held = rest
            return False
        self._held = "".join(self._space) + rest
        self._space.clear()
        self._state = self._in_answer
        return True

    def _in_reasoning(self) -> bool:
        end = self._format.end
        found = self._held.find(end)
        if found >= 0:
            self._put_reasoning(self._held[:found])
            self._held = self._held[found + len(end) :]
            self._space.clear()
            self._state = self._before_answer
            return True
        settled = len(self._held) - (0 if self._final else begun_len(self._held, (end,)))
        self._put_reasoning(self._held[:settled])
        self._held = self._held[settled:]
        if self._final and self._begun:
            self._give(True, "".join(self._space))
            self._space.clear()
        return False

    def _put_reasoning(self, text: str) -> None:
        if not self._begun:
            text = text.lstrip(WHITE)
        core = text.rstrip(WHITE)
        if core:
            self._give(True, "".join(self._space) + core)
            self._space.clear()
            self._begun = True
        self._space.append(text[len(core) :])

    def _before_answer(self) -> bool:
        self._held = self._held.lstrip(WHITE)
        if not self._held:
            return False
        self._state = self._in_answer
        return True

    def _in_answer(self) -> bool:
        self._give(False, self._held)
        self._held = ""
        return False

    def _give(self, is_reasoning: bool, text: str) -> None:
        if text:
            self._parts.append(Part(is_reasoning, text))
