"""`/v1/models` and `/v1/model*` over HTTP: what users and admins see, and loading while others are served."""

import json
import threading
import time

import openai
import pytest
from model_folders import place_model

from headlong.server import keys
from support.serving import RunningServer

USER, ADMIN = "a-user-s-key", "an-admin-s-key"
AS_USER, AS_ADMIN = {"x-api-key": USER}, {"x-admin-key": ADMIN}
EMBEDDED = "tale-20m"
STORY = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    place_model(folder / "one")
    place_model(folder / "owner" / "two")
    broken = place_model(folder / "broken")
    (broken / "config.json").write_text("{}")
    options = {"api_keys": (keys.hash_key(USER),), "admin_keys": (keys.hash_key(ADMIN),)}
    with RunningServer(model_dir=str(folder), inline_loading=True, max_rows=4, **options) as server:
        yield server


@pytest.fixture
def http(running):
    """With the embedded model serving."""
    with running.client() as client:
        if running.server.pool.find(EMBEDDED) is None:
            client.post("/v1/model/load", json={"model": EMBEDDED}, headers=AS_ADMIN)
        yield client


def ids(http, headers) -> list[str]:
    return [card["id"] for card in http.get("/v1/models", headers=headers).json()["data"]]


def test_users_see_what_serves_and_admins_what_could(http):
    assert ids(http, AS_USER) == [EMBEDDED]
    assert ids(http, AS_ADMIN) == [EMBEDDED, "broken", "one", "owner/two"]
    cards = http.get("/v1/models", headers=AS_ADMIN).json()["data"]
    assert [card["headlong"]["loaded"] for card in cards] == [True, False, False, False]
    assert "folder" in cards[0]["headlong"] and cards[0]["headlong"]["memory"]["kv_bytes"] > 0
    seen = http.get("/v1/models", headers=AS_USER).json()["data"][0]["headlong"]
    assert not {"folder", "memory"} & seen.keys()


@pytest.mark.usefixtures("http")
def test_the_openai_client_lists_models(running):
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=USER)
    assert [model.id for model in client.models.list()] == [EMBEDDED]
    assert client.models.retrieve(EMBEDDED).owned_by == "headlong"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("one")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong").models.list()


@pytest.mark.parametrize("name", ["one", "owner/two"])
def test_one_model_with_a_slash_or_without(http, name):
    assert http.get(f"/v1/models/{name}", headers=AS_ADMIN).json()["headlong"] == {"loaded": False}
    hidden = http.get(f"/v1/models/{name}", headers=AS_USER)
    nothing = http.get("/v1/models/no-such", headers=AS_USER)
    assert hidden.status_code == nothing.status_code == 404
    assert hidden.json()["error"]["message"] == nothing.json()["error"]["message"].replace("no-such", name)


def test_users_may_not_load(http):
    for path in ("/v1/model/load", "/v1/model/unload"):
        assert http.post(path, json={"model_name": EMBEDDED}, headers=AS_USER).status_code == 403
        assert http.post(path, json={"model_name": EMBEDDED}).status_code == 401
    refused = http.post(
        "/v1/chat/completions", json=STORY | {"model": "one", "max_tokens": 2}, headers=AS_USER
    )
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    assert ids(http, AS_USER) == [EMBEDDED]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "model_name"),
        ({"model_name": 3}, 400, "model_name"),
        ({"model_name": "one", "bogus": 1}, 400, "bogus"),
        ({"model_name": "one", "max_rows": "4"}, 400, "max_rows"),
        ({"model_name": "../one"}, 404, "model_name"),
        ({"model_name": "/etc"}, 404, "model_name"),
        ({"model_name": "one", "drafter": "/etc"}, 404, "drafter"),
        ({"model_name": "one", "drafter": "/etc/passwd"}, 404, "drafter"),
        ({"model_name": "one", "drafter": "/no/such/place"}, 404, "drafter"),
        ({"model_name": "one", "drafter": "../one"}, 404, "drafter"),
        ({"model_name": "one", "drafter": "~"}, 404, "drafter"),
        ({"model_name": "one", "max_rows": 0}, 400, None),
        ({"model_name": "one", "gpu_memory_fraction": 2}, 400, None),
        ({"model_name": "one", "draft_model": {"draft_mode": "eagle"}}, 400, None),
        ({"model_name": "one", "draft_tokens": 1, "draft_model": {"draft_num_tokens": 2}}, 400, None),
        ({"model_name": "broken"}, 400, None),
    ],
)
def test_refused_loads_leave_the_old_one(http, body, status, param):
    answer = http.post("/v1/model/load", json=body, headers=AS_ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert ids(http, AS_USER) == [EMBEDDED]
    served = http.post("/v1/chat/completions", json=STORY | {"max_tokens": 2}, headers=AS_USER)
    assert served.status_code == 200


def test_a_drafter_has_a_name_like_any_model(http):
    told = {
        path: http.post("/v1/model/load", json={"model_name": "one", "drafter": path}, headers=AS_ADMIN)
        .json()["error"]["message"]
        .replace(path, "PATH")
        for path in ("/etc/hostname", "/etc/no-such-file")
    }
    assert len(set(told.values())) == 1, "the answer tells which files there are"
    loaded = http.post(
        "/v1/model/load",
        json={"model_name": "one", "drafter": "owner/two", "proposer": "draft"},
        headers=AS_ADMIN,
    )
    assert loaded.status_code == 200, loaded.text
    served = http.post(
        "/v1/chat/completions",
        json=STORY | {"model": "one", "max_tokens": 8, "speculative": {"mtp": 2}},
        headers=AS_USER,
    ).json()
    assert served["timings"]["draft_n"] > 0
    assert http.post("/v1/model/load", json={"model_name": EMBEDDED}, headers=AS_ADMIN).status_code == 200


def test_loading_while_a_stream_runs(running, http):
    body = STORY | {"model": EMBEDDED, "max_tokens": 400}
    alone = http.post("/v1/chat/completions", json=body, headers=AS_USER).json()["choices"][0]["message"][
        "content"
    ]
    answers = []

    def ask() -> None:
        with running.client() as own:
            answers.append(own.post("/v1/chat/completions", json=body, headers=AS_USER).json())

    asking = threading.Thread(target=ask)
    asking.start()
    while not running.server.pool.current.users:
        time.sleep(0.001)
    loaded = http.post(
        "/v1/model/load",
        json={
            "model_name": "owner/two",
            "draft_model": {"draft_mode": "mtp", "draft_num_tokens": 5},
            "max_seq_len": 512,
        },
        headers=AS_ADMIN,
    ).json()
    assert (loaded["id"], loaded["native_mtp"]["default_k"], loaded["max_model_len"]) == ("owner/two", 5, 512)
    assert ids(http, AS_USER) == ["owner/two"]
    assert http.get("/v1/model", headers=AS_USER).json()["id"] == "owner/two"
    asking.join(60)
    assert answers[0]["choices"][0]["message"]["content"] == alone and answers[0]["model"] == EMBEDDED


def test_inline_loading_by_an_admin(http):
    headers = {"authorization": f"Bearer {ADMIN}"}
    answer = http.post(
        "/v1/chat/completions", json=STORY | {"model": "one", "max_tokens": 2}, headers=headers
    )
    assert answer.status_code == 200 and answer.json()["model"] == "one"
    assert ids(http, AS_USER) == ["one"]


def events(http, body) -> list:
    with http.stream("POST", "/v1/model/load", json=body | {"stream": True}, headers=AS_ADMIN) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in answer.iter_lines() if line]


def test_progress_as_events(http):
    *progress, finished, done = events(http, {"model_name": "one"})
    assert done == "[DONE]" and json.loads(finished)["model"]["id"] == "one"
    shares = [entry["done"] / entry["total"] for entry in map(json.loads, progress)]
    assert shares == sorted(shares) and shares[-1] == 1 and 1 < len(shares) <= 102
    *_, failed, done = events(http, {"model_name": "broken"})
    assert done == "[DONE]" and json.loads(failed)["error"]["code"] == "model_load_failed"


def test_unloading(http):
    gone = http.post("/v1/model/unload", json={"model_name": EMBEDDED}, headers=AS_ADMIN)
    assert gone.json() == {"id": EMBEDDED, "object": "model", "unloaded": True, "running_requests": 0}
    assert ids(http, AS_USER) == []
    for answer in (
        http.get("/v1/model", headers=AS_USER),
        http.post("/v1/chat/completions", json=STORY, headers=AS_USER),
        http.post("/v1/model/unload", json={}, headers=AS_ADMIN),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_model")
    assert http.get("/health").status_code == 200
    assert http.post("/v1/model/load", json={"model": EMBEDDED}, headers=AS_ADMIN).status_code == 200
