"""Strings of a checkpoint reach the terminal escaped: they move no cursor, forge no line and are no markup."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headlong.cli.drafts import AnswerWriter
from headlong.cli.main import main
from headlong.cli.terminal import console, note, say
from headlong.completion import Chunk
from headlong.printable import printable, printable_answer
from headlong.progress import BarProgress
from support.command import Headlong

EVIL = "\x1b[2J\x1b]0;pwned\x07\r\x9b31m\u202egpj.exe\u2066[red]x[/red]:smile:"
RAW = "\x1b\x07\r\x9b\u202e\u2066"
SHOWN = r"\x1b[2J\x1b]0;pwned\x07\r\x9b31m\u202egpj.exe\u2066[red]x[/red]:smile:"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def harmless(text: str) -> bool:
    return not any(character in text for character in RAW)


def test_names_and_sentences() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("a\nb\tc", keep="\n") == "a\nb\\tc"
    assert printable("naïve 日本語 👍") == "naïve 日本語 👍"
    assert printable("\u2028\u00ad\ud800\U000e0041") == r"\u2028\xad\ud800\U000e0041"


def test_answers_keep_what_scripts_need() -> None:
    family, persian, japanese = "👨\u200d👩\u200d👧", "می\u200cخواهم", "日本\u3000語"
    text = f"{family}\n\t{persian} {japanese}\xa0"
    assert printable_answer(text) == text
    assert printable_answer(EVIL) == SHOWN
    assert printable_answer("\x00\x7f\x85\u061c\u200f\u2029\U000e0041") == (
        r"\x00\x7f\x85\u061c\u200f\u2029\U000e0041"
    )


def evil_model(folder: Path) -> Path:
    (folder / "config.json").write_text(
        json.dumps({"model_type": EVIL, "quantization_config": {"quant_method": EVIL}})
    )
    save_file({f"model.{EVIL}.weight": torch.zeros(2)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "words", ["inspect", "inspect --all", "run", "chat", "quantize --format int4 -o out"]
)
def test_a_hostile_checkpoint(headlong: Headlong, tmp_path: Path, words: str) -> None:
    model = evil_model(tmp_path)
    command, *rest = words.split()
    done = headlong(command, *rest, str(model), *(["hello"] if command == "run" else []))
    assert done.code in (1, 2)
    assert harmless(done.out + done.err) and r"\x1b[2J" in done.out + done.err


def test_a_hostile_name_of_a_folder(headlong: Headlong, tmp_path: Path) -> None:
    folder = tmp_path / f"m{EVIL.replace('/', '')}"
    folder.mkdir()
    done = headlong("inspect", str(folder))
    assert done.code == 2 and harmless(done.err) and r"\x1b[2J" in done.err


def test_tables_measure_what_they_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.table import Table

    monkeypatch.setenv("FORCE_COLOR", "1")
    out = console()
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    table.add_row("x")
    out.print(table)
    out.print(EVIL)
    text = capsys.readouterr().out
    assert harmless(text) and text.count(SHOWN) == 4
    rows = [line for line in text.splitlines() if line.startswith(("│", "┃"))]
    assert len({len(line) for line in rows}) == 1


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    note(f"one\n{EVIL}")
    captured = capsys.readouterr()
    assert captured.out == f"{SHOWN}\n"
    assert captured.err == f"one\n{SHOWN}\n"


def test_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    bars = BarProgress()
    bars(EVIL, 0, 2)
    bars(EVIL, 2, 2)
    assert SHOWN in screen.getvalue()
    assert not any(character in screen.getvalue() for character in "\x07\x9b\u202e\u2066")


def test_what_verbose_says(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("headlong"), "level", logging.NOTSET)
    headlong("inspect", "-v", "no-such-model")
    (handler,) = root.handlers
    record = logging.LogRecord("headlong.x", logging.INFO, "", 1, "loading %s", (EVIL,), None)
    assert handler.format(record) == f"headlong.x: loading {SHOWN}"


@pytest.mark.parametrize(("stream", "text"), [(Screen(), SHOWN), (io.StringIO(), EVIL)])
def test_answers_are_shown_on_terminals_and_passed_on_to_pipes(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, text: str
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    writer = AnswerWriter(None, tint=False)
    writer.write(Chunk(0, f"a\n\t{EVIL}", (), ()))
    assert stream.getvalue() == f"a\n\t{text}"
    assert writer.text == f"a\n\t{EVIL}", "what the conversation remembers is the answer itself"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["keys", "list"])
def test_a_full_device_is_one_sentence(words: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headlong.cli.main", words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 74
    assert done.stderr == "headlong: no space is left for the output\n"


def test_errors_of_the_disk_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("headlong.cli.main._parse", fail)
    with pytest.raises(PermissionError):
        main(["list"])
