"""`headlong bench`: the gate, the table, the closing JSON line; and the prompt files it reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headlong.cli.prompts import read_prompts
from headlong.errors import RequestError
from headlong.llm import LLM
from support.command import Headlong


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    entries = [
        {"prompt": "Tell me a story."},
        {"turns": ["Write a poem.", "And another."]},
        {"messages": [{"role": "user", "content": "Hello!"}]},
    ]
    file.write_text("\n\n".join(json.dumps(entry) for entry in entries))
    return str(file)


def test_table_and_json_line(headlong: Headlong, prompts: str) -> None:
    flags = (
        "--prompts",
        prompts,
        "--max-tokens",
        "12",
        "--draft-tokens",
        "2",
        "--rounds",
        "2",
        "--rows",
        "2",
    )
    done = headlong("bench", *flags)
    assert done.code == 0
    lines = done.out.splitlines()
    assert "identical tokens" in lines[0]
    record = json.loads(lines[-1])
    assert record["identical"] is True
    assert (record["prompts"], record["rows"], record["rounds"], record["max_tokens"]) == (3, 2, 2, 12)
    assert record["device"] == "cpu" and record["dtype"] and record["torch_threads"] >= 1
    assert record["headlong"] and "commit" in record
    plain, drafting = record["results"]
    assert plain["draft_tokens"] == 0 and drafting["draft_tokens"] == 2
    assert plain["tokens_per_step"] == 1.0 and plain["speed_up"] == 1.0
    assert drafting["tokens_per_step"] > 1.0
    assert len(drafting["acceptance_per_position"]) == 2
    assert drafting["speed_up_min"] <= drafting["speed_up"] <= drafting["speed_up_max"]
    assert all(result["ms_per_step"] > 0 and result["tokens_per_second"] > 0 for result in record["results"])


def test_no_speed_where_tokens_differ(
    headlong: Headlong, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = LLM.generate

    def lie(self, prompts, params=None):
        done = honest(self, prompts, params)
        return [replace(d, token_ids=d.token_ids[:-1]) for d in done] if params.draft_tokens else done

    monkeypatch.setattr(LLM, "generate", lie)
    done = headlong("bench", "--prompts", prompts, "--max-tokens", "6", "--draft-tokens", "2", "--rows", "2")
    assert done.code == 1
    assert "tokens/s" not in done.out
    assert "prompt 1 differs from plain decoding at token 5" in done.out
    assert json.loads(done.out.splitlines()[-1])["results"] == []


def test_fewer_prompts_than_rows_are_repeated(headlong: Headlong, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Explain rain to a child.\n")
    asked = ("--max-tokens", "4", "--draft-tokens", "1", "--rounds", "1", "--rows", "3")
    record = json.loads(headlong("bench", "--prompts", str(file), *asked).out.splitlines()[-1])
    assert (record["prompts"], record["rows"]) == (3, 3)


def test_text_files_hold_a_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert read_prompts(str(file)) == ["one", "two"]
    assert len(read_prompts(None)) == 6


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "has no prompts"),
        ("{", "line 1: is not JSON"),
        ("[1]", 'line 1: needs "prompt"'),
        ('{"prompt": "fine"}\n{"turns": [1]}', 'line 2: needs "prompt"'),
    ],
)
def test_bad_prompt_files(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(RequestError, match=complaint):
        read_prompts(str(file))


def test_missing_prompt_file(headlong: Headlong) -> None:
    done = headlong("bench", "--prompts", "/nowhere/prompts.txt")
    assert done.code == 2 and done.err.startswith("headlong bench: --prompts /nowhere/prompts.txt")
