"""Where a small file is a pipe, a device, a folder or far too long: a sentence at once, and no memory taken."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headlong import small_files
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.gguf import read_gguf
from headlong.checkpoint.safetensors import read_file
from headlong.checkpoint.source import EMBEDDED
from headlong.checkpoint.tensor_info import TensorInfo, map_tensor, read_tensor
from headlong.errors import HeadlongError
from headlong.speculate import frequencies
from headlong.text.template import read_template
from headlong.text.tokenizer import Tokenizer

SPARSE = 1 << 40


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE)


STRANGE = pytest.mark.parametrize("make", [pipe, device, folder, huge])
SAID = "no regular file|is a folder|larger than"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED, tmp_path / "model"))


@STRANGE
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
    ],
)
def test_a_checkpoint(model: Path, make: Callable[[Path], None], name: str) -> None:
    (model / name).unlink(missing_ok=True)
    make(model / name)
    with pytest.raises(HeadlongError, match=SAID):
        Checkpoint.open(model)


@pytest.mark.parametrize("make", [pipe, device, folder])
@pytest.mark.parametrize("read", [read_tensor, map_tensor])
def test_weights_that_were_replaced_after_the_header_was_read(
    model: Path, make: Callable[[Path], None], read: Callable[[TensorInfo], torch.Tensor]
) -> None:
    """Nobody waits for the writer of a pipe, and nothing is read from a device."""
    name = "model-00001-of-00003.safetensors"
    info = next(one for one in read_file(model / name)[0].values() if one.nbytes)
    info.file.unlink()
    make(info.file)
    with pytest.raises(HeadlongError, match=r"cannot be read.*(no regular file|is a folder)"):
        read(info)
    for reader in (read_file, read_gguf):
        with pytest.raises(HeadlongError, match="no such file"):
            reader(info.file)


@STRANGE
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer(model: Path, make: Callable[[Path], None], name: str) -> None:
    (model / name).unlink(missing_ok=True)
    make(model / name)
    with pytest.raises(HeadlongError, match=SAID):
        Tokenizer.from_folder(model)


@pytest.mark.parametrize("make", [pipe, device, folder])
def test_tokenizer_json(model: Path, make: Callable[[Path], None]) -> None:
    (model / "tokenizer.json").unlink()
    make(model / "tokenizer.json")
    with pytest.raises(HeadlongError, match="no regular file"):
        Tokenizer.from_folder(model)


@STRANGE
def test_files_that_options_name(tmp_path: Path, make: Callable[[Path], None]) -> None:
    from headlong.server import config_file

    make(tmp_path / "file")
    for read in (
        config_file.read,
        lambda file: read_template(str(file)),
        lambda file: frequencies.read_list(file, 9),
    ):
        with pytest.raises(HeadlongError, match=SAID):
            read(tmp_path / "file")


@STRANGE
def test_the_command(model: Path, make: Callable[[Path], None]) -> None:
    """With an address space in which nothing large can be read."""
    (model / "config.json").unlink()
    make(model / "config.json")
    limited = f"ulimit -v 8000000; exec '{sys.executable}' -m headlong.cli.main inspect '{model}'"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "config.json: cannot be read" in done.stdout


def test_what_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("ä" * 8, encoding="utf-8")
    (tmp_path / "link").symlink_to(file)
    assert small_files.read_text(tmp_path / "link", 16) == "ä" * 8
    with pytest.raises(OSError, match="larger than 15 bytes"):
        small_files.read_bytes(file, 15)
    with pytest.raises(FileNotFoundError):
        small_files.read_bytes(tmp_path / "nothing", 15)
