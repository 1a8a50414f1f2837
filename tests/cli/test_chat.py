"""`headlong chat` over a pipe: turns, commands, interruption."""

import io
import signal
import sys

import pytest

from headlong.cli import chat
from headlong.cli.drafts import AnswerWriter
from support.command import Headlong

FLAGS = ("--max-tokens", "16", "--temperature", "0", "--draft-tokens", "3")
"""A fixed depth: with `auto` an engine on a busy machine rightly decides to draft nothing."""


@pytest.fixture
def say(headlong: Headlong, monkeypatch: pytest.MonkeyPatch):
    def call(lines: str, *flags: str):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return headlong("chat", *FLAGS, *flags)

    return call


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The messages the model was given, turn by turn."""
    seen: list[list[dict[str, str]]] = []
    stream = chat.Conversation._stream

    def recording(self, turn, writer):
        seen.append(turn)
        return stream(self, turn, writer)

    monkeypatch.setattr(chat.Conversation, "_stream", recording)
    return seen


def test_turns_and_commands(say) -> None:
    done = say("Hello!\n/stats\n\n/help\n/nonsense\n/exit\nnever read\n")
    assert done.code == 0
    assert done.out.count("\n") == len(done.out.splitlines()) and done.out.strip()
    notes = done.err.splitlines()
    assert notes[0].startswith("16 tokens · ")
    assert notes[1].startswith("1 answer · 16 tokens · ") and "of drafts accepted" in notes[1]
    assert "/clear" in notes[2]
    assert notes[3].startswith("there is no /nonsense")
    assert len(notes) == 4


def test_history_until_cleared(say, turns: list[list[dict[str, str]]]) -> None:
    answers = say("Hello!\nGo on.\n/clear\nHello!\n", "--system", "Be kind.").out
    system, hello = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}
    first = turns[1][2]
    assert first["role"] == "assistant" and answers.startswith(first["content"])
    assert turns == [
        [system, hello],
        [system, hello, first, {"role": "user", "content": "Go on."}],
        [system, hello],
    ]


def test_interrupt_stops_one_answer(say, turns, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = say("Hello!\n").out
    write, seen = AnswerWriter.write, []

    def interrupting(self: AnswerWriter, chunk) -> None:
        write(self, chunk)
        seen.append(chunk)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(AnswerWriter, "write", interrupting)
    done = say("Hello!\nGo on.\n")
    assert done.code == 0
    notes = done.err.splitlines()
    assert notes[0] == "stopped" and " tokens · " in notes[1]
    partial = turns[-1][1]["content"]
    assert partial and whole.startswith(partial) and len(partial) < len(whole) - 1


def test_too_long_a_turn_leaves_the_conversation(say) -> None:
    done = say("word " * 5000 + "\nHello!\n")
    assert done.code == 0
    notes = done.err.splitlines()
    assert "prompt has" in notes[0] and "/clear" in notes[0]
    assert done.out == say("Hello!\n").out
