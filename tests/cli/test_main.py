"""The command line as a whole: help, version, mistakes, signals, and docs/help.md."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

import headlong as package
from headlong.cli import models, terminal
from headlong.cli.help import page
from support.command import Headlong

PAGE = Path(__file__).parents[2] / "docs" / "help.md"
COMMANDS = ("run", "chat", "inspect", "list", "bench")


def test_help_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "docs/help.md is stale; run `python -m headlong.cli.help > docs/help.md`"
    )


@pytest.mark.parametrize("words", [(), ("--help",), *((command, "--help") for command in COMMANDS)])
def test_help(headlong: Headlong, words: tuple[str, ...]) -> None:
    done = headlong(*words)
    assert done.code == 0 and not done.err
    assert done.out.startswith("usage: headlong")
    assert max(len(line) for line in done.out.splitlines()) <= 110


def test_help_and_version_load_no_torch() -> None:
    script = (
        "import sys\nfrom headlong.cli.main import main\n"
        "for words in (['--version'], ['run', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"headlong {package.__version__}\n")


def test_public_names_are_all_there() -> None:
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
        assert name in dir(package)
    with pytest.raises(AttributeError, match="nonsense"):
        package.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("nonsense", "invalid choice: 'nonsense'"),
        ("run", "there is nothing to run; give a PROMPT, or a MODEL to chat with"),
        ("run a b c", "unrecognized arguments: c"),
        ("run --bogus hello", "unrecognized arguments: --bogus"),
        ("run --max-tokens many hello", "--max-tokens: must be a whole number, not 'many'"),
        ("run --temperature -1 hello", "temperature must be at least 0"),
        ("run --top-p 2 hello", "top_p must be above 0"),
        ("run --min-tokens 9 --max-tokens 8 hello", "min_tokens (9) is above max_tokens (8)"),
        ("run --draft-tokens some hello", "--draft-tokens: must be a whole number or 'auto'"),
        ("run --draft-tokens 99 hello", "draft_tokens must be a whole number from 0 to 16, not 99"),
        ("run --dtype int4 hello", "dtype must be 'auto' or one of"),
        ("run --mtp maybe hello", "--mtp: invalid choice: 'maybe'"),
        ("run no-such-model hello", "'no-such-model' is neither an existing folder"),
        ("chat no-such-model", "'no-such-model' is neither an existing folder"),
        ("inspect no-such-model", "'no-such-model' is neither an existing folder"),
        ("bench --draft-tokens 0,x", "--draft-tokens: must be a whole number, not 'x'"),
        ("bench --draft-tokens=-1", "-1 is below 0"),
        ("bench --rounds 0", "--rounds: must be at least 1"),
    ],
)
def test_mistakes_are_one_sentence(headlong: Headlong, words: str, complaint: str) -> None:
    done = headlong(*words.split())
    assert done.code == 2
    assert done.err.startswith("headlong") and complaint in done.err
    assert done.err.count("\n") == 1 and not done.out


def test_an_empty_prompt(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    done = headlong("run", "-")
    assert done.code == 2 and "prompt is empty" in done.err


def test_ctrl_c(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "execute", interrupt)
    done = headlong("list")
    assert done.code == 130 and done.err == "\n"


def test_a_closed_pipe_is_quiet() -> None:
    words = [sys.executable, "-m", "headlong.cli.main", "inspect"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_when_colours_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.wants_colour("auto", Screen())
    assert not terminal.wants_colour("auto", io.StringIO())
    assert not terminal.wants_colour("never", Screen())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.wants_colour("auto", Screen())
    assert terminal.wants_colour("always", io.StringIO())
