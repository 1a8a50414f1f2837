"""`inspect` says of every model what loading it to serve would say: one check, made by both."""

import json
import shutil
from pathlib import Path

import pytest

from headlong.checkpoint.source import EMBEDDED
from headlong.config import EngineConfig
from headlong.engine.local import LocalEngines
from headlong.errors import HeadlongError
from headlong.progress import silent
from support.command import Headlong


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED, tmp_path / "model"))


BROKEN = {
    "generation_config.json": [
        {"temperature": -1, "do_sample": True},
        {"top_p": 7, "do_sample": True},
        {"temperature": "hot", "do_sample": True},
        {"repetition_penalty": 0, "do_sample": True},
    ],
    "chat_template.jinja": ["{% for %}", "{{ x " + "y" * 70_000, "x" * 300_000],
    "tokenizer_config.json": [{"chat_template": "{% endif %}"}, []],
    "tokenizer.json": [{}, "nonsense"],
}
CASES = [(name, value) for name, values in BROKEN.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
def test_what_serve_refuses(headlong: Headlong, model: Path, name: str, value: object) -> None:
    if name == "tokenizer_config.json":
        (model / "chat_template.jinja").unlink()  # goes before what is in the other file
    (model / name).write_text(value if name.endswith(".jinja") else json.dumps(value))  # type: ignore[arg-type]
    with pytest.raises(HeadlongError) as refused:
        LocalEngines().load(str(model), EngineConfig(), silent)
    done = headlong("inspect", str(model), "--json")
    told = json.loads(done.out)
    assert done.code == 1 and not told["servable"]
    assert told["reason"] == str(refused.value)


def test_a_template_of_ones_own(headlong: Headlong, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for %}")
    assert headlong("inspect", str(model)).code == 1
    assert headlong("inspect", str(model), "--chat-template", "{{ messages[0].content }}").code == 0
