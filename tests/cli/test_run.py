"""`headlong run`: text on stdout, statistics on stderr, comparison, tints."""

import io
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headlong.checkpoint.source import EMBEDDED, names_model
from headlong.cli import chat, compare
from headlong.cli.drafts import TINT, UNTINT
from headlong.llm import LLM
from support.command import Headlong
from support.pseudo_terminal import PseudoTerminal

STORY = "Tell me a story."
SHORT = ("--max-tokens", "24", "--temperature", "0")
DRAFTING = ("--draft-tokens", "3")
"""For tests that look at drafts: with `auto` an engine on a busy machine rightly decides to draft nothing."""


def test_text_then_statistics(headlong: Headlong) -> None:
    done = headlong("run", *DRAFTING, *SHORT, STORY)
    assert done.code == 0
    assert done.out.strip() and done.out.endswith("\n")
    assert re.fullmatch(
        r"24 tokens · [\d.]+ tokens/s · [\d.]+ tokens/step · accepted( \d+%)+ · MTP on\n", done.err
    )


def test_one_text_for_any_spelling(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    text = headlong("run", *SHORT, STORY).out
    monkeypatch.setattr(sys, "stdin", io.StringIO(STORY + "\n"))
    assert headlong("run", *SHORT, "-").out == text
    assert headlong("run", "tale-20m", *SHORT, STORY).out == text
    plain = headlong("run", "--draft-tokens", "0", *SHORT, STORY)
    assert plain.out == text
    assert "MTP off: the engine runs with draft_tokens 0" in plain.err


def test_raw_skips_the_template(headlong: Headlong) -> None:
    assert headlong("run", "--raw", *SHORT, STORY).out != headlong("run", *SHORT, STORY).out


def test_stop_strings_may_repeat(headlong: Headlong) -> None:
    words = headlong("run", *SHORT, STORY).out.split(" ")
    done = headlong("run", "--stop", "no such words", "--stop", f" {words[2]} {words[3]}", *SHORT, STORY)
    assert done.out == f"{words[0]} {words[1]}\n"


def test_compare_reports_speed_and_identity(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "ROUNDS", 1)
    done = headlong("run", "--compare", *DRAFTING, *SHORT, STORY)
    assert done.code == 0
    assert re.search(r"[\d.]+x plain decoding \([\d.]+ tokens/s\) · identical tokens$", done.err.strip())


def test_compare_of_sampled_text(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "ROUNDS", 1)
    done = headlong("run", "--compare", *DRAFTING, "--max-tokens", "24", STORY)
    assert done.code == 0 and done.err.strip().endswith("identical tokens")
    (seed,) = re.findall(r" · seed (\d+) · ", done.err)
    assert headlong("run", *DRAFTING, "--max-tokens", "24", "--seed", seed, STORY).out == done.out


def test_compare_fails_loudly(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LLM.generate

    def lie(self, prompts, params=None):
        done = honest(self, prompts, params)
        return replace(done, token_ids=(*done.token_ids[:5], 7, *done.token_ids[6:]))

    monkeypatch.setattr(LLM, "generate", lie)
    done = headlong("run", "--compare", *DRAFTING, *SHORT, STORY)
    assert done.code == 1
    assert "TOKENS DIFFER from plain decoding at token 5: first " in done.err
    assert "identical" not in done.err


def test_compare_without_drafting(headlong: Headlong) -> None:
    done = headlong("run", "--compare", "--draft-tokens", "0", *SHORT, STORY)
    assert done.code == 0 and done.err.strip().endswith("nothing to compare")


def test_compare_refuses_what_changes_tokens(headlong: Headlong) -> None:
    done = headlong("run", "--compare", "--temperature", "1", "--verify", "ratio", STORY)
    assert done.code == 2 and "--verify coupled" in done.err


def test_no_escape_codes_in_a_pipe(headlong: Headlong) -> None:
    plain = headlong("run", *SHORT, STORY).out
    assert headlong("run", "--show-drafts", *SHORT, STORY).out == plain
    tinted = headlong("run", "--show-drafts", "--color", "always", *DRAFTING, *SHORT, STORY).out
    assert TINT in tinted
    assert tinted.replace(TINT, "").replace(UNTINT, "") == plain


def test_tints_on_a_terminal(headlong: Headlong) -> None:
    plain = headlong("run", *SHORT, STORY).out
    words = [sys.executable, "-m", "headlong.cli.main", "run", "--show-drafts", *DRAFTING, *SHORT, STORY]
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        words, stdout=theirs, stderr=subprocess.PIPE, env=environment | {"TERM": "xterm"}
    ) as process:
        os.close(theirs)
        seen = _read_all(ours)
        assert process.stderr is not None
        complaints = process.stderr.read().decode()
    assert process.returncode == 0, complaints
    text = seen.decode().replace("\r\n", "\n")
    assert TINT in text
    assert text.replace(TINT, "").replace(UNTINT, "") == plain


def test_sampling_is_the_models_own(headlong: Headlong, tmp_path: Path) -> None:
    seeded = ("--seed", "9", "--max-tokens", "24", STORY)
    text = headlong("run", *seeded).out
    flags = ("--temperature", "0.7", "--top-p", "0.9", "--repetition-penalty", "1.15")
    assert headlong("run", "--generation-config", "none", *flags, *seeded).out == text
    assert headlong("run", "--generation-config", "none", *seeded).out != text
    assert headlong("run", "--top-p", "0.5", *seeded).out != text
    refused = headlong("run", "--generation-config", str(tmp_path), *seeded)
    assert refused.code == 2 and "give auto, none or a folder" in refused.err


def test_a_template_of_ones_own(headlong: Headlong, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}")
    raw = headlong("run", "--raw", *SHORT, STORY).out
    assert headlong("run", "--chat-template", str(file), *SHORT, STORY).out == raw
    assert headlong("run", "--chat-template", file.read_text(), *SHORT, STORY).out == raw
    for wrong, complaint in (("nowhere.jinja", "cannot be read"), ("{% if %}", "not valid Jinja")):
        done = headlong("run", "--chat-template", wrong, *SHORT, STORY)
        assert done.code == 2 and "chat_template: " in done.err and complaint in done.err


def test_one_word_is_a_model_if_it_names_one(
    headlong: Headlong, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a pipe, what comes through is the prompt; a word that names no model is one itself."""
    text = headlong("run", *SHORT, STORY).out
    monkeypatch.setattr(sys, "stdin", io.StringIO(STORY + "\n"))
    assert headlong("run", "tale-20m", *SHORT).out == text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Hello").mkdir()  # a folder, but no model
    assert headlong("run", "Hello", *SHORT).out == headlong("run", "tale-20m", "Hello", *SHORT).out


@pytest.mark.parametrize(
    ("word", "is_one"),
    [
        ("smollm2", True),
        ("Qwen/Qwen3.5-0.8B", True),
        (str(EMBEDDED), True),
        ("Tell me a story.", False),
        ("Yes or no: a/b?", False),
        ("Hello", False),
        ("x" * 5000, False),
        ("a\0b", False),
        ("", False),
    ],
)
def test_what_names_a_model(word: str, is_one: bool) -> None:
    assert names_model(word) == is_one


def test_a_model_alone_is_a_chat() -> None:
    with PseudoTerminal("run", "tale-20m", "--max-tokens", "8") as terminal:
        terminal.wait_for(f"^{chat.PROMPT.strip()}$")
        terminal.type("Hello\n")
        terminal.wait_for(r"^\d+ tokens? · .*MTP (on|off)")
        terminal.type("/exit\n")
        assert terminal.wait_for_the_end() == 0


def test_a_chat_compares_nothing(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    done = headlong("run", "--compare", "tale-20m")
    assert done.code == 2 and "--compare needs a prompt, and 'tale-20m' names a model" in done.err


def _read_all(descriptor: int) -> bytes:
    seen = b""
    with os.fdopen(descriptor, "rb", buffering=0) as terminal:
        try:
            while piece := terminal.read(4096):
                seen += piece
        except OSError:  # Linux: the other side closed
            pass
    return seen
