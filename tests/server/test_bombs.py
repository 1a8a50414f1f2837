"""A tokenizer made to take all time and memory, beside a model that serves."""

import json
from pathlib import Path

import pytest
from model_folders import place_model

from headlong.text import tokenizer_file, tokenizer_trial
from support.serving import RunningServer

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def test_a_server_goes_on_beside_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the checks of a file would miss, as an admin loads it."""
    monkeypatch.setattr(tokenizer_file, "check", lambda _: None)
    monkeypatch.setattr(tokenizer_trial, "MAX_CPU_SECONDS", 1)
    file = place_model(tmp_path / "bomb") / "tokenizer.json"
    normalizer = {"type": "Sequence", "normalizers": [DOUBLE] * 30}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": normalizer}))
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with RunningServer(model_dir=str(tmp_path)) as running, running.client() as http:
        answer = http.post("/v1/model/load", json={"model_name": "bomb"})
        assert answer.status_code == 400 and "building it takes" in answer.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
