"""How requests are sampled that do not say: by the model's generation_config.json, the settings, or their own word."""

import json

import pytest

from headlong.llm import LLM
from headlong.params import SamplingParams
from headlong.progress import silent
from support.serving import RunningServer

PROMPT = "The lighthouse"
SEEDED = {"prompt": PROMPT, "max_tokens": 24, "seed": 11}
RECOMMENDED = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.15}


@pytest.fixture(scope="module")
def llm():
    return LLM(max_rows=2, progress=silent)


def text_of(server: RunningServer, **fields) -> str:
    with server.client() as http:
        answer = http.post("/v1/completions", json=SEEDED | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


def card(server: RunningServer) -> dict:
    with server.client() as http:
        return http.get("/v1/models").json()["data"][0]["headlong"]


def written(llm: LLM, **sampling) -> str:
    return llm.generate(PROMPT, SamplingParams(max_tokens=24, seed=11, **sampling)).text


def test_the_models_own(llm: LLM):
    with RunningServer(generation_config="auto") as server:
        assert card(server)["sampling"] == RECOMMENDED
        assert text_of(server) == written(llm, **RECOMMENDED)
        # Each field that a request names wins, one by one, and so does a value that turns it off.
        assert text_of(server, temperature=0) == written(llm, **RECOMMENDED | {"temperature": 0.0})
        plain = {"temperature": 0, "repetition_penalty": 1, "top_p": 1}
        assert text_of(server, **plain) == written(llm, temperature=0.0)
        assert text_of(server, top_k=5) == written(llm, **RECOMMENDED, top_k=5)


def test_none_is_openais(llm: LLM):
    with RunningServer(generation_config="none") as server:
        assert card(server)["sampling"] == {"temperature": 1.0}
        assert text_of(server) == written(llm, temperature=1.0)


def test_a_folder_and_the_settings(llm: LLM, tmp_path):
    recommended = {"temperature": 0.4, "top_k": 9, "max_new_tokens": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    with RunningServer(generation_config=str(tmp_path), sampling={"top_k": 3}) as server:
        assert card(server)["sampling"] == {"temperature": 0.4, "top_k": 3}
        assert text_of(server) == written(llm, temperature=0.4, top_k=3)
        chat = {"messages": [{"role": "user", "content": "Tell me a story."}], "seed": 1, "ignore_eos": True}
        with server.client() as http:
            for more, length in (({}, 5), ({"max_tokens": 12}, 12)):
                usage = http.post("/v1/chat/completions", json=chat | more).json()["usage"]
                assert usage["completion_tokens"] == length


def test_the_library_without_params(llm: LLM):
    """Nothing is said here either, so sampling is as the authors suggest; a seed of its own makes each text another."""
    assert llm.recommended_params() == SamplingParams(**RECOMMENDED)
    assert len({llm.generate(PROMPT).text for _ in range(3)}) == 3


def test_a_request_cannot_name_a_file():
    with RunningServer(admin_keys=()) as server, server.client() as http:
        for field in ("generation_config", "chat_template"):
            answer = http.post("/v1/model/load", json={"model": "tale-20m", field: "/etc"})
            assert answer.status_code == 400 and field in answer.json()["error"]["message"]
