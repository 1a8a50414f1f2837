"""From a name to a folder: folders, the cache, a hub that answers on localhost, and one that does not."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save, save_file

from headlong.checkpoint.source import EMBEDDED, EMBEDDED_NAME, list_local, resolve
from headlong.errors import CheckpointError
from support.fake_hub import SHA, fake_hub

INDEX = "model.safetensors.index.json"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Empty caches and no network: the library reads the environment once, so its constants are set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def fill_cache(cache: Path, repo: str, files: dict[str, bytes]) -> Path:
    """Lays a snapshot out as the library does: blobs, links to them, and a ref."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / SHA
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(SHA)
    for name, data in files.items():
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def model_files(shards: int = 2) -> dict[str, bytes]:
    weight_map = {f"t{i}": f"model-{i}.safetensors" for i in range(2)}
    files = {
        "config.json": b'{"model_type": "tiny"}',
        "tokenizer.json": b"{}",
        INDEX: json.dumps({"weight_map": weight_map}).encode(),
    }
    return files | {f"model-{i}.safetensors": save({f"t{i}": torch.ones(2)}) for i in range(shards)}


def test_embedded(tmp_path, monkeypatch):
    assert resolve(None) == EMBEDDED and (EMBEDDED / "config.json").exists()
    monkeypatch.chdir(tmp_path)
    assert resolve(EMBEDDED_NAME) == EMBEDDED
    (tmp_path / EMBEDDED_NAME).mkdir()
    (tmp_path / EMBEDDED_NAME / "config.json").write_text("{}")
    assert resolve(EMBEDDED_NAME) == Path(EMBEDDED_NAME)


def test_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither config.json nor .safetensors"):
        resolve(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    assert resolve(str(tmp_path)) == resolve(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match=f"is a file, but no .gguf; pass its folder, {tmp_path}"):
        resolve(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="there is no folder"):
        resolve(tmp_path / "none")


NO_MODELS = ["nope", "./a/b", "/no/such", "a/b/c", "a/b--c", "a/../b", "a/b.git", "-a/b", "a/b.", "~nobody/x"]


@pytest.mark.parametrize("model", [*NO_MODELS, "a b/c", "a/\0", "x" * 5000])
def test_neither_folder_nor_repository(model):
    with pytest.raises(CheckpointError, match="neither an existing folder nor a Hugging Face repository id"):
        resolve(model)


@pytest.mark.parametrize("model", ["", "  "])
def test_empty_name(model):
    with pytest.raises(CheckpointError, match="the name is empty"):
        resolve(model)


def test_offline_and_not_cached(cache):
    with pytest.raises(CheckpointError) as caught:
        resolve("owner/name")
    message = str(caught.value)
    assert "'owner/name'" in message and "HF_HUB_OFFLINE" in message
    assert "hf download owner/name" in message and "\n" not in message
    assert [model.name for model in list_local()] == [EMBEDDED_NAME]
    assert not cache.exists()


def test_offline_from_the_environment(tmp_path):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = run_resolve(env)
    assert done["error"].startswith("'owner/name' is not complete in the local cache and HF_HUB_OFFLINE")


def test_cached_snapshot_resolves_offline(cache):
    snapshot = fill_cache(cache, "owner/name", model_files())
    assert resolve("owner/name") == snapshot
    assert resolve("owner/name", revision=SHA) == snapshot
    with pytest.raises(CheckpointError, match="hf download"):
        resolve("owner/name", revision="other")


def test_incomplete_snapshot_is_not_taken(cache):
    fill_cache(cache, "owner/name", model_files(shards=1))
    with pytest.raises(CheckpointError, match="not complete in the local cache"):
        resolve("owner/name")


def test_dangling_blob_is_incomplete(cache):
    snapshot = fill_cache(cache, "owner/name", model_files())
    (snapshot / "model-1.safetensors").resolve().unlink()
    with pytest.raises(CheckpointError, match="not complete"):
        resolve("owner/name")


def test_weights_without_tokenizer_still_serve(cache):
    files = model_files()
    del files["tokenizer.json"]
    snapshot = fill_cache(cache, "owner/name", files)
    assert resolve("owner/name") == snapshot


def test_list_local(cache):
    snapshot = fill_cache(cache, "b/whole", model_files())
    fill_cache(cache, "a/broken", model_files(shards=1))
    fill_cache(cache, "c/untyped", model_files() | {"config.json": b"{}"})
    fill_cache(cache, "d/damaged", model_files() | {"config.json": b"{"})
    fill_cache(cache, "e/no-weights", {"config.json": b'{"model_type": "x"}'})
    embedded, whole = list_local()
    assert (embedded.name, embedded.path, embedded.model_type) == (EMBEDDED_NAME, EMBEDDED, "qwen3_5_text")
    assert embedded.nbytes > 40_000_000
    assert (whole.name, whole.path, whole.model_type) == ("b/whole", snapshot, "tiny")
    assert whole.nbytes == sum(len(data) for name, data in model_files().items() if name.endswith("tensors"))


RESOLVE = """
import json, sys
from headlong.checkpoint.source import resolve
from headlong.errors import CheckpointError
seen = []
try:
    folder = resolve("owner/name", progress=lambda *args: seen.append(args))
    print(json.dumps({"folder": str(folder), "progress": seen}))
except CheckpointError as error:
    print(json.dumps({"error": str(error)}))
"""


def run_resolve(env: dict[str, str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE], capture_output=True, text=True, check=True, env=env, timeout=120
    )
    return json.loads(done.stdout) | {"stderr": done.stderr}


def hub_env(home: Path, endpoint: str) -> dict[str, str]:
    dropped = ("HF_", "HUGGING", "TRANSFORMERS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    env = {k: v for k, v in os.environ.items() if not k.upper().startswith(dropped)}
    return {**env, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}


def test_download_then_cache(tmp_path):
    large = torch.zeros(25 * 2**18)  # 25 MB arrive in several pieces
    files = model_files() | {
        "big.bin": b"no",
        "onnx/model.safetensors": b"no",
        "mtp.safetensors": save({"fc": large}),
    }
    with fake_hub(files) as endpoint:
        done = run_resolve(hub_env(tmp_path, endpoint))
    folder = Path(done["folder"])
    got = {path.name for path in folder.iterdir()}
    assert got == files.keys() - {"big.bin", "onnx/model.safetensors"}
    assert all((folder / name).read_bytes() == files[name] for name in got)
    labels = {label for label, _, _ in done["progress"]}
    assert labels == {f"download {name}" for name in got - {"config.json"}}
    for label in labels:
        counts = [(n, total) for name, n, total in done["progress"] if name == label]
        assert counts[0][0] == 0 and counts[-1][0] == counts[-1][1] == len(files[label.split()[1]])
    pieces = [n for label, n, _ in done["progress"] if label == "download mtp.safetensors"]
    assert len(pieces) > 2 and pieces == sorted(pieces)
    assert "it/s" not in done["stderr"] and "%" not in done["stderr"]
    again = run_resolve(hub_env(tmp_path, "http://127.0.0.1:9"))  # nothing listens there: the cache is enough
    assert again["folder"] == done["folder"] and again["progress"] == []


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "is gated: accept its terms"),
        (404, "RepoNotFound", "Hugging Face has no model 'owner/name'"),
        (404, "RevisionNotFound", "has no revision"),
        (401, "", "Hugging Face has no model 'owner/name'"),
    ],
)
def test_refused_by_the_hub(tmp_path, status, code, message):
    with fake_hub({}, status, code) as endpoint:
        done = run_resolve(hub_env(tmp_path, endpoint))
    assert message in done["error"] and "\n" not in done["error"]


def test_unreachable_hub(tmp_path):
    done = run_resolve(hub_env(tmp_path, "http://127.0.0.1:9"))
    assert "check the network" in done["error"] and "hf download owner/name" in done["error"]
    assert "\n" not in done["error"]


def test_repository_without_safetensors(tmp_path):
    with fake_hub({"config.json": b"{}", "model.gguf": b"x"}) as endpoint:
        done = run_resolve(hub_env(tmp_path, endpoint))
    assert "has no .safetensors files" in done["error"]
