"""`headlong pull`: what is fetched, what is printed, what is refused."""

import shutil
from pathlib import Path

import pytest

from headlong.checkpoint import hub
from headlong.checkpoint.source import EMBEDDED
from support.command import Headlong


def test_a_repository(headlong: Headlong, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hugging Face is played by a folder; the way there is that of `run` and `serve`."""
    asked, shown = [], []

    def download(repo: str, revision: str | None, progress) -> Path:
        asked.append((repo, revision))
        progress("download model.safetensors", 1, 2)
        progress("download model.safetensors", 2, 2)
        return Path(shutil.copytree(EMBEDDED, tmp_path / "fetched"))

    monkeypatch.setattr(hub, "cached", lambda repo, revision: None)  # noqa: ARG005
    monkeypatch.setattr(hub, "download", download)
    monkeypatch.setattr("headlong.cli.pull.default_progress", lambda: lambda *report: shown.append(report))
    done = headlong("pull", "some/model", "--revision", "v2")
    assert done.code == 0 and done.out == f"{tmp_path / 'fetched'}\n"
    assert asked == [("some/model", "v2")] and shown[-1] == ("download model.safetensors", 2, 2)
    assert done.err == "40.9 MB · with an MTP head\n"


def test_what_is_here_already(headlong: Headlong) -> None:
    done = headlong("pull", "tale-20m")
    assert done.code == 0 and done.out == f"{EMBEDDED}\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("pull", "the following arguments are required: MODEL"),
        ("pull nonsense", "'nonsense' is neither a repository id `owner/name` nor one of smollm2"),
        ("pull smollm2 --revision main", "--revision is for repositories"),
        ("pull nowhere/there/is", "'nowhere/there/is' is neither an existing folder nor"),
    ],
)
def test_mistakes(headlong: Headlong, words: str, complaint: str) -> None:
    done = headlong(*words.split())
    assert done.code == 2 and complaint in done.err and done.err.count("\n") == 1 and not done.out
