"""Tokenizer files made to break things: a sentence that names the file, in time, with no traceback."""

import json
import time
from pathlib import Path

import pytest

from headlong.checkpoint.source import EMBEDDED
from headlong.errors import CheckpointError, RequestError
from headlong.text import tokenizer_file, tokenizer_trial
from headlong.text.tokenizer import Tokenizer

GOOD = json.loads((Path(EMBEDDED) / "tokenizer.json").read_text())
WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def replaced(**parts: object) -> dict:
    return GOOD | parts


FILES = {
    "not an object": [],
    "empty": {},
    "doubled thirty times": replaced(normalizer={"type": "Sequence", "normalizers": [DOUBLE] * 30}),
    "doubled in sequences of sequences": replaced(
        normalizer={
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [DOUBLE] * 4}] * 5,
        }
    ),
    "a letter becomes a book": replaced(normalizer=DOUBLE | {"content": "a" * 100_000}),
    "a book between all letters": replaced(
        normalizer=DOUBLE | {"pattern": {"Regex": ""}, "content": "a" * 5000}
    ),
    "a long prefix": replaced(normalizer={"type": "Prepend", "prepend": "a" * 100_000}),
    "many steps": replaced(normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 100_000}),
    "a pattern without an end": replaced(pre_tokenizer=SPLIT | {"pattern": {"Regex": "("}}),
    "a nested pattern": replaced(pre_tokenizer=SPLIT | {"pattern": {"Regex": "(a+)+$"}}),
    "a product of repetitions": replaced(pre_tokenizer=SPLIT | {"pattern": {"Regex": "((a{99}){99}){99}"}}),
    "a long pattern": replaced(pre_tokenizer=SPLIT | {"pattern": {"Regex": "a|" * 100_000}}),
    "a huge id": replaced(model=GOOD["model"] | {"vocab": GOOD["model"]["vocab"] | {"zzz": 2**31}}),
    "a huge added id": replaced(added_tokens=[{"id": 2**31, "content": "zzz", "special": True}]),
    "a negative id": replaced(model=GOOD["model"] | {"vocab": GOOD["model"]["vocab"] | {"zzz": -1}}),
    "many added tokens": replaced(added_tokens=[{"id": n, "content": f"<{n}>"} for n in range(100_000)]),
    "merges of nothing": replaced(model=GOOD["model"] | {"merges": [["never", "there"]]}),
    "a missing unknown token": replaced(model=WORDS | {"unk_token": "[UNK]"}),
    "a model of no type": replaced(model={"type": "Nothing"}),
    "a template of nothing": replaced(
        post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}]}
    ),
}


def written(folder: Path, text: str) -> Path:
    (folder / "tokenizer.json").write_text(text)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_used_are_refused(tmp_path, name):
    started = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(written(tmp_path, json.dumps(FILES[name])))
    assert time.perf_counter() - started < 5
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "tokenizer.json")) and len(message) < 1000


@pytest.mark.parametrize("text", ["", "{", "[" * 200_000, '{"a":' * 200_000, "\0", "NaN"])
def test_files_that_are_no_json_are_refused(tmp_path, text):
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        Tokenizer.from_folder(written(tmp_path, text))


def test_a_file_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_file, "MAX_FILE_BYTES", 1000)
    with pytest.raises(CheckpointError, match="it is larger than 1000 bytes"):
        Tokenizer.from_folder(written(tmp_path, json.dumps(GOOD)))


def test_words_that_are_not_known_are_refused_by_prompt(tmp_path):
    """A vocabulary without an unknown token can only be told with the text."""
    words = {name: one for name, one in WORDS.items() if name != "unk_token"} | {"unk_token": "b"}
    tokenizer = Tokenizer.from_folder(
        written(tmp_path, json.dumps(replaced(model=words, added_tokens=[], pre_tokenizer=None)))
    )
    assert tokenizer is not None and tokenizer.encode("a", False) == [0]


def test_a_pattern_that_gives_up_concerns_its_text_alone(tmp_path):
    """Backtracking has a limit, at which the library panics: the next prompt is read."""
    pattern = {"Regex": r"(?:a|aa|aaa)+$(?<=b)"}
    tokenizer = Tokenizer.from_folder(
        written(tmp_path, json.dumps(replaced(pre_tokenizer=SPLIT | {"pattern": pattern})))
    )
    assert tokenizer is not None
    started = time.perf_counter()
    with pytest.raises(RequestError, match="prompt: this model's tokenizer cannot read it"):
        tokenizer.encode("a" * 45)
    assert time.perf_counter() - started < 20
    assert tokenizer.encode("a")


@pytest.mark.parametrize("name", ["doubled thirty times", "doubled in sequences of sequences"])
def test_what_the_bounds_of_a_file_miss_ends_another_process(tmp_path, monkeypatch, name):
    """The checks of the file are taken away, and another process still bounds what it takes."""
    monkeypatch.setattr(tokenizer_file, "check", lambda _: None)
    monkeypatch.setattr(tokenizer_trial, "MAX_CPU_SECONDS", 1)
    monkeypatch.setattr(tokenizer_trial, "MAX_BYTES", 256 << 20)
    folder = written(tmp_path, json.dumps(FILES[name]))
    with pytest.raises(CheckpointError, match="building it takes") as caught:
        Tokenizer.from_folder(folder, apart=True)
    assert str(caught.value).startswith(str(tmp_path / "tokenizer.json"))


def test_a_good_file_is_tried_and_read(tmp_path):
    found = Tokenizer.from_folder(written(tmp_path, json.dumps(GOOD)), apart=True)
    assert found is not None and found.vocab_size > 1000
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        Tokenizer.from_folder(written(tmp_path, json.dumps(FILES["a model of no type"])), apart=True)
