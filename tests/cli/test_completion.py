"""`headlong completion`: the scripts, asked by the shells themselves where these are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from headlong.cli.main import build_parser
from support.command import Headlong

ASK = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_headlong
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
CASES = [
    ("headlong ser", {"serve"}),
    ("headlong run --mtp ''", {"auto", "on", "off"}),
    ("headlong run --comp", {"--compare"}),
    ("headlong bench serve --endpoint ''", {"chat", "completions"}),
    ("headlong bench ser", {"serve"}),
    ("headlong serve --tool-format q", {"qwen3_coder"}),
    ("headlong run smol", {"smollm2"}),
]


@pytest.fixture
def script(headlong: Headlong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the script of a shell into an otherwise empty folder, where the test stands then."""

    def write(shell: str) -> Path:
        done = headlong("completion", shell)
        assert done.code == 0 and not done.err
        monkeypatch.chdir(tmp_path)
        path = tmp_path / f".script.{shell}"
        path.write_text(done.out)
        return path

    return write


def run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash(script) -> None:
    path = script("bash")
    for words, wanted in CASES:
        assert set(run("bash", "-c", ASK.format(script=path, words=words)).split()) == wanted, words
    (path.parent / "model.gguf").touch()
    assert run("bash", "-c", ASK.format(script=path, words="headlong inspect mod")).split() == ["model.gguf"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh(script) -> None:
    path = script("zsh")
    load = "autoload -Uz compinit; compinit -u -D; source"
    assert "_headlong" in run("zsh", "-f", "-c", f"{load} {path}; echo $_comps[headlong]")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(script) -> None:
    path = script("fish")
    for words, wanted in CASES:
        asked = words.replace("''", "")
        found = run("fish", "--no-config", "-c", f"source {path}; complete -C '{asked}'").splitlines()
        assert wanted <= {line.split("\t")[0] for line in found}, words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_flag_is_there(headlong: Headlong, shell: str) -> None:
    text = headlong("completion", shell).out
    for name, parser in build_parser()[1].items():
        assert name.split()[-1] in text
        for action in parser._actions:
            for flag in action.option_strings if action.help != "==SUPPRESS==" else ():
                assert flag in text or f"-l {flag[2:]} " in text or f"-s {flag[1:]} " in text
    assert "--tensor-parallel-size" not in text, "flags that the help does not show are not offered"


def test_other_shells(headlong: Headlong) -> None:
    done = headlong("completion", "tcsh")
    assert done.code == 2 and "invalid choice: 'tcsh'" in done.err
