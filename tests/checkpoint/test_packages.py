"""Models out of Python packages: made-up wheels, fetched by the real pip from a folder, never from a network."""

import hashlib
import os
import shutil
import sys
import time
import venv
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headlong import LLM, SamplingParams
from headlong.checkpoint import packages
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.packages import PACKAGES, Package, fetch, fetched, folder_of
from headlong.checkpoint.source import list_local, resolve
from headlong.convert.extract import extract
from headlong.convert.strip import strip
from headlong.convert.to_gguf import to_gguf
from headlong.errors import CheckpointError, ConfigError
from support import tiny_llama

NAME, MEMBER, WHEEL = "tiny", "headlong_tiny/tiny.gguf", "headlong_tiny-1.0-py3-none-any.whl"
DATA = bytes(range(256)) * 5000


def offer(folder: Path, data: bytes, head: Path | None = None) -> Package:
    """A wheel with `data` as its model, where pip looks for wheels."""
    folder.mkdir(parents=True, exist_ok=True)
    info = "headlong_tiny-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(MEMBER, data)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: headlong-tiny\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    nbytes = (folder / WHEEL).stat().st_size
    return Package(
        "tiny", "headlong-tiny==1.0", MEMBER, hashlib.sha256(data).hexdigest(), len(data), nbytes, head
    )


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """Where wheels are offered. The cache is empty, pip asks no index and reads nobody's configuration."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "wheels"


@pytest.fixture
def package(wheels, monkeypatch) -> Package:
    offered = offer(wheels, DATA)
    monkeypatch.setitem(PACKAGES, NAME, offered)
    return offered


def refusal(name: str = NAME) -> str:
    """Why `name` cannot be fetched: one sentence, after which nothing half done is left."""
    with pytest.raises(CheckpointError) as caught:
        fetch(name)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"'{name}' ")
    folder = folder_of(name)
    assert not folder.is_dir() or not any(folder.iterdir())
    return message


@pytest.mark.usefixtures("package")
def test_fetched_once(wheels, monkeypatch):
    seen = []
    file = resolve(NAME, progress=lambda *report: seen.append(report))
    assert file == folder_of(NAME) / "tiny.gguf" and file.read_bytes() == DATA
    assert [path.name for path in file.parent.iterdir()] == ["tiny.gguf"]
    assert [label for label, done, total in seen if done == total] == [
        "download headlong-tiny==1.0",
        "unpack tiny.gguf",
    ]
    assert seen[0][1] == 0 and all(0 <= done <= total for _, done, total in seen)
    shutil.rmtree(wheels)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert resolve(NAME, progress=lambda *report: pytest.fail(f"{report}")) == file


@pytest.mark.usefixtures("package")
def test_what_lies_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "config.json").write_text("{}")
    assert resolve(NAME) == Path(NAME)
    with pytest.raises(CheckpointError, match="there is no folder"):
        resolve(tmp_path / "elsewhere" / NAME)


@pytest.mark.usefixtures("package")
def test_a_folder_called_pip_is_not_pip(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pip").mkdir()
    for file in ("__init__.py", "__main__.py"):
        (tmp_path / "pip" / file).write_text("raise SystemExit('the wrong pip')")
    assert fetch(NAME).read_bytes() == DATA


def test_a_file_of_another_size_is_fetched_again(package):
    file = folder_of(NAME) / package.file
    file.parent.mkdir(parents=True)
    file.write_bytes(DATA[:1000])
    assert fetch(NAME).read_bytes() == DATA


@pytest.mark.usefixtures("package")
def test_interrupted(monkeypatch):
    started = []
    popen = packages.subprocess.Popen
    monkeypatch.setattr(
        packages.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )

    def interrupt(_, done, total):
        if started and done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(NAME, interrupt)
    assert started[0].returncode is not None  # pip does not go on alone
    assert not any(folder_of(NAME).iterdir())
    assert fetch(NAME).read_bytes() == DATA


@pytest.mark.usefixtures("package")
def test_left_behind():
    folder = folder_of(NAME)
    for name, age in ((".old.partial", 48 * 3600), (".new.partial", 60)):
        (folder / name).mkdir(parents=True)
        (folder / name / "half.whl").write_bytes(b"half")
        os.utime(folder / name, (time.time() - age,) * 2)
    fetch(NAME)
    assert sorted(path.name for path in folder.iterdir()) == [".new.partial", "tiny.gguf"]


def test_wrong_checksum(wheels, monkeypatch, package):
    offer(wheels, DATA[::-1])
    message = refusal()
    assert package.sha256 in message and hashlib.sha256(DATA[::-1]).hexdigest() in message
    assert "from another index" in message
    offer(wheels, DATA + DATA)  # longer than promised: not read to its end
    assert "has the SHA-256" in refusal()
    monkeypatch.setitem(PACKAGES, NAME, offer(wheels, DATA))
    assert fetch(NAME).read_bytes() == DATA


def test_damaged_wheel(wheels, package):
    whole = (wheels / WHEEL).read_bytes()
    at = whole.index(MEMBER.encode()) + len(MEMBER) + 200
    (wheels / WHEEL).write_bytes(whole[:at] + bytes(64) + whole[at + 64 :])
    assert f"{WHEEL} is damaged" in refusal() and package.nbytes == len(DATA)
    (wheels / WHEEL).write_bytes(whole[: len(whole) // 2])
    assert "pip says" in refusal()


@pytest.mark.usefixtures("package")
def test_no_such_package(wheels):
    (wheels / WHEEL).unlink()
    message = refusal()
    assert "pip says 'No matching distribution found for headlong-tiny==1.0'" in message
    assert "pip download --no-deps headlong-tiny==1.0" in message and "PIP_FIND_LINKS" in message


@pytest.mark.usefixtures("package")
def test_no_network(wheels, monkeypatch):
    (wheels / WHEEL).unlink()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_RETRIES", "1")
    message = refusal()
    assert "cannot reach the package index; check the network" in message and "PIP_FIND_LINKS" in message


@pytest.mark.usefixtures("package")
def test_no_pip(tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    assert f"{python} has no pip; run `{python} -m ensurepip`" in refusal()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "/no/such/python cannot be started to run pip" in refusal()


def test_no_space(monkeypatch, package):
    needed = package.nbytes + package.wheel_nbytes
    usage = shutil.disk_usage("/")._replace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    message = refusal()
    assert "make room there, or set XDG_CACHE_HOME" in message and str(folder_of(NAME)) in message


@pytest.mark.usefixtures("package")
def test_disk_full_while_unpacking(monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "(No space left on device): make room there" in refusal()


@pytest.mark.usefixtures("package")
def test_cache_that_is_no_folder(tmp_path):
    (tmp_path / "cache").write_text("")
    assert "set XDG_CACHE_HOME to another folder" in refusal()


def test_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert folder_of(NAME) == tmp_path / ".cache" / "headlong" / "models" / NAME


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.usefixtures("package")
def test_user_without_a_home(monkeypatch):
    """As in a container whose user is only a number: what was kept is not there, and that is all."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="no home folder; set XDG_CACHE_HOME"):
        fetch(NAME)
    assert fetched() == {}
    assert LLM(device="cpu").generate([1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True)).stats.mtp


def test_what_was_fetched_is_listed(package, monkeypatch):
    assert NAME not in fetched()
    file = fetch(NAME)
    (listed,) = (model for model in list_local() if model.name == NAME)
    assert (listed.path, listed.model_type, listed.nbytes) == (file, "tiny", package.nbytes)
    monkeypatch.setitem(PACKAGES, NAME, replace(package, nbytes=package.nbytes + 1))
    assert NAME not in fetched()  # not whole


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny GGUF file, and its head elsewhere."""
    folder = tmp_path_factory.mktemp("model")
    made = Checkpoint.open(tiny_llama.make(folder / "made").folder)
    strip(made, folder / "bare")
    to_gguf(Checkpoint.open(folder / "bare"), folder / "tiny.gguf", type="f32")
    extract(made, folder / "mtp.safetensors")
    return folder / "tiny.gguf", folder / "mtp.safetensors"


def test_drafts_with_the_head(wheels, monkeypatch, model):
    gguf, head = model
    monkeypatch.setitem(PACKAGES, NAME, offer(wheels, gguf.read_bytes(), head))
    done = LLM(NAME, device="cpu").generate([1, 2, 3], SamplingParams(max_tokens=8, draft_tokens=2))
    plain = LLM(gguf, device="cpu", mtp="off").generate([1, 2, 3], SamplingParams(max_tokens=8))
    assert done.stats.mtp and not plain.stats.mtp
    assert done.token_ids == plain.token_ids


def test_the_head_is_renewed(wheels, monkeypatch, model):
    gguf, head = model
    monkeypatch.setitem(PACKAGES, NAME, offer(wheels, gguf.read_bytes(), head))
    copy = fetch(NAME).parent / head.name
    assert copy.read_bytes() == head.read_bytes()
    copy.write_bytes(b"an older one")
    shutil.rmtree(wheels)
    assert fetch(NAME).parent == copy.parent and copy.read_bytes() == head.read_bytes()
    assert sorted(path.name for path in copy.parent.iterdir()) == ["mtp.safetensors", "tiny.gguf"]


def test_smollm2():
    """What is pinned belongs together, and the head we ship is there, for that model's sizes."""
    package = PACKAGES["smollm2"]
    assert len(bytes.fromhex(package.sha256)) == 32 and package.file.endswith(".gguf")
    assert package.head is not None
    head = load_file(package.head)
    assert head["mtp.fc.weight"].shape == (576, 2 * 576)
    assert head["mtp.layers.0.self_attn.k_proj.weight"].shape == (3 * 64, 576)
