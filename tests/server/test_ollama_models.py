"""Ollama's paths around models over real sockets: listing, showing, loading, unloading, fetching; users and admins."""

import json

import httpx
import ollama
import pytest
import torch
from huggingface_hub import constants
from model_folders import place_model
from safetensors.torch import save

from headlong.server import keys
from headlong.version import __version__
from support.fake_hub import fake_hub
from support.scripted import ScriptedEngine, ScriptedEngines
from support.serving import RunningServer

MODEL = "tale-20m"
USER, ADMIN = "a-user-s-key", "an-admin-s-key"
KEYS = {"api_keys": (keys.hash_key(USER),), "admin_keys": (keys.hash_key(ADMIN),)}
HUB = {
    "config.json": b'{"model_type": "tiny"}',
    "tokenizer.json": b"{}",
    "model.safetensors": save({"weight": torch.zeros(1 << 16)}),
}


@pytest.fixture
def keyed(tmp_path, monkeypatch):
    """(a server with keys and a library, a user's client, an admin's client); nothing in any cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    place_model(tmp_path / "models" / "one")
    engines = ScriptedEngines(*(ScriptedEngine("A dragon slept.") for _ in range(3)))
    with RunningServer(model_dir=str(tmp_path / "models"), loader=engines, **KEYS) as running:
        clients = [
            ollama.Client(running.url, headers={"authorization": f"Bearer {key}"}) for key in (USER, ADMIN)
        ]
        yield running, *clients


def names(client):
    return [model.model for model in client.list().models]


def test_list_and_show(server):
    client = ollama.Client(server.url)
    entry = next(one for one in client.list().models if one.model == f"{MODEL}:latest")
    assert entry.size > 40e6 and len(entry.digest) == 64 and entry.modified_at.year > 2000
    assert entry.details.parameter_size == "20.5M" and entry.details.quantization_level == "BF16"
    assert entry.details.format == "safetensors" and entry.details.family == "qwen3_5_text"
    for name in (MODEL, f"{MODEL}:latest"):
        shown = client.show(name)
        assert shown.details == entry.details
        assert shown.modelinfo["general.architecture"] == "qwen3_5_text"
        assert shown.modelinfo["qwen3_5_text.context_length"] == 4096
        assert shown.modelinfo["general.parameter_count"] == 20_468_832
        assert "completion" in shown.capabilities and "<|im_start|>" in shown.template
        assert f"FROM {MODEL}" in shown.modelfile
    with pytest.raises(ollama.ResponseError) as caught:
        client.show("nobody")
    assert caught.value.status_code == 404


def test_what_it_can_do(tool_server):
    client = ollama.Client(tool_server.url)
    shown = client.show(tool_server.server.pool.current.id)
    assert shown.capabilities == ["completion", "tools", "thinking"]


def test_ps(server):
    (entry,) = ollama.Client(server.url).ps().models
    assert entry.model == entry.name == f"{MODEL}:latest" and entry.context_length == 4096
    assert entry.size > 40e6 and entry.size_vram == 0 and entry.expires_at.year == 2300


def test_version_and_whether_anybody_is_there(server):
    with server.client() as http:
        told = http.get("/api/version").json()
        assert told["headlong"] == __version__ and tuple(map(int, told["version"].split("."))) >= (0, 6, 4)
        assert http.head("/").status_code == 200
    with RunningServer(loader=ScriptedEngines(ScriptedEngine("")), page=False) as bare, bare.client() as http:
        assert http.head("/").status_code == 200 and http.get("/").text == "Ollama is running"


def test_users_see_what_serves_and_admins_what_could(keyed):
    running, user, admin = keyed
    assert names(user) == [f"{MODEL}:latest"]
    assert names(admin) == [f"{MODEL}:latest", "one:latest"]
    assert admin.show("one").details.parameter_size == "20.5M"
    with pytest.raises(ollama.ResponseError, match="there is no 'one'"):
        user.show("one")
    with pytest.raises(ollama.ResponseError, match="API key"):
        ollama.Client(running.url).list()


def test_without_a_prompt_models_are_loaded_and_unloaded(keyed):
    running, user, admin = keyed
    assert user.generate(MODEL).done_reason == "load"
    for ask in (lambda: user.generate("one"), lambda: user.chat("one", [])):
        with pytest.raises(ollama.ResponseError, match="there is no 'one'"):
            ask()
    loaded = admin.chat("one:latest", [])
    assert loaded.done and loaded.done_reason == "load" and names(user) == ["one:latest"]
    assert user.chat("one", [{"role": "user", "content": "Hi"}], keep_alive=0).message.content
    assert running.server.pool.find("one") is not None, "a prompt's keep_alive unloads nothing"
    for zero in (0, "0s", "0"):
        with pytest.raises(ollama.ResponseError, match="admin key"):
            user.generate("one", keep_alive=zero)
    assert admin.generate("one", keep_alive="0m").done_reason == "unload" and names(user) == []
    assert next(admin.generate(MODEL, stream=True)).done_reason == "load"


def test_pull(keyed, monkeypatch):
    _, user, admin = keyed
    with pytest.raises(ollama.ResponseError, match="admin key"):
        user.pull("owner/name")
    with fake_hub(HUB) as endpoint:
        for name, value in {
            "ENDPOINT": endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        steps = list(admin.pull("hf.co/owner/name:latest", stream=True))
        assert admin.pull("owner/name").status == "success", "it is here already"
    assert [steps[0].status, steps[-1].status] == ["pulling manifest", "success"]
    counts = [
        (one.completed, one.total)
        for one in steps
        if one.status == "download model.safetensors" and one.digest
    ]
    assert counts[0] == (0, len(HUB["model.safetensors"])) and counts[-1][0] == counts[-1][1]
    assert "owner/name:latest" in names(admin) and "owner/name:latest" not in names(user)


def test_pulls_that_fail(keyed, monkeypatch):
    _, _, admin = keyed
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, status, why in (
        ("llama3", 404, "no registry of Ollama's"),
        ("../secrets", 404, "no registry"),
        ("a/b/c", 404, "no registry"),
        ("owner/nothing", 400, "HF_HUB_OFFLINE"),
    ):
        with pytest.raises(ollama.ResponseError, match=why) as caught:
            admin.pull(name)
        assert caught.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="HF_HUB_OFFLINE"):
        list(admin.pull("owner/nothing", stream=True))


def test_what_is_not_here_says_why(server):
    client = ollama.Client(server.url)
    for ask in (
        lambda: client.embed(MODEL, "Hi"),
        lambda: client.embeddings(MODEL, "Hi"),
        lambda: client.delete(MODEL),
        lambda: client.copy(MODEL, "other"),
        lambda: client.create("other", from_=MODEL),
        lambda: client.push(MODEL),
    ):
        with pytest.raises(ollama.ResponseError, match=r"here|form") as caught:
            ask()
        assert caught.value.status_code == 400


@pytest.mark.parametrize("path", ["show", "pull", "chat", "generate"])
@pytest.mark.parametrize(
    "body", ["{}", '{"model": ""}', '{"model": 3}', "[]", '{"model": "' + "x" * 600 + '"}']
)
def test_hostile_names(server, path, body):
    answer = httpx.post(f"{server.url}/api/{path}", content=body, trust_env=False)
    assert answer.status_code in (400, 404), answer.text
    assert isinstance(json.loads(answer.text)["error"], str) and len(answer.text) < 600
