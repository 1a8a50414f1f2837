"""Counts of tokens: which are chosen by them, how they are kept, and what files may say."""

import json
import logging

import pytest
import torch

from headlong.config import EngineConfig
from headlong.errors import ConfigError
from headlong.speculate import frequencies
from headlong.speculate.frequencies import most_frequent, read_list

FINGERPRINT = "ab" * 32


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_most_frequent_then_the_first():
    counts = {9: 5, 3: 2, 7: 2, 50: 99}
    assert most_frequent(counts, 2, 10).tolist() == [3, 9], "token 50 is none of ten"
    assert most_frequent(counts, 5, 10).tolist() == [0, 1, 3, 7, 9]
    assert most_frequent({}, 4, 10).tolist() == [0, 1, 2, 3]
    assert most_frequent(counts, 3, 10, always=(8, 2, 8, 44)).tolist() == [2, 8, 9]
    assert most_frequent(counts, 1, 10, always=(8, 2)).tolist() == [2, 8]


def test_counts_come_back():
    assert frequencies.load(FINGERPRINT) is None
    file = frequencies.save(FINGERPRINT, {3: 7, 1: 2})
    assert frequencies.load(FINGERPRINT) == {3: 7, 1: 2}
    assert frequencies.load("cd" * 32) is None and [entry.name for entry in file.parent.iterdir()] == [
        file.name
    ]
    assert read_list(file, 10) == [3, 1], "what is stored is a file like any other"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"version": 1',
        '{"version": 1, "tokenizer": "x", "counts": {}}',
        "[" * 100_000,
        "counts -1",
        "counts {}x",
    ],
)
def test_damaged_counts_are_ignored(text, caplog):
    good = {"version": 1, "tokenizer": FINGERPRINT, "counts": {"1": 1}}
    if text == "counts -1":
        text = json.dumps(good | {"counts": {"1": -1}})
    elif text.startswith("counts"):
        text = json.dumps(good | {"counts": {"x": 1}})
    file = frequencies.path_of(FINGERPRINT)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert frequencies.load(FINGERPRINT) is None
    assert str(file) in caplog.text and "headlong tune" in caplog.text


FORMS = {
    "list.json": "[5, 3, 9]",
    "counts.json": '{"5": 10, "3": 1, "9": 2, "4": 0}',
    "named.json": '{"counts": {"5": 10, "3": 1, "9": 2}}',
    "ids.txt": "5\n3\n\n9\n",
    "counts.txt": "5 10\n3\t1\n9 2\n4 0\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_files(name, tmp_path):
    (tmp_path / name).write_text(FORMS[name])
    assert read_list(tmp_path / name, 10) == [5, 3, 9]


@pytest.mark.parametrize("saved", [[5, 3, 9], torch.tensor([5, 3, 9])])
def test_lists_as_torch_saves_them(saved, tmp_path):
    torch.save(saved, tmp_path / "freq.pt")
    assert read_list(tmp_path / "freq.pt", 10) == [5, 3, 9]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no token"),
        ("[]", "names no token"),
        ('{"3": 0}', "names no token"),
        ("[3, 10]", "token 10, but the model's vocabulary has 10"),
        ("[3, -1]", "no whole number"),
        ("[3, true]", "no whole number"),
        ("[3, 2.5]", "no whole number"),
        ("the dog\n", "no whole number"),
        ("3 4 5\n", "no whole number"),
        ('{"counts": [3]}', "no object"),
        ('{"three": 3}', "no whole number"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_wrong_files(text, reason, tmp_path):
    (tmp_path / "list").write_text(text)
    with pytest.raises(ConfigError, match=rf"draft_vocab .*{reason}"):
        read_list(tmp_path / "list", 10)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match=r"draft_vocab .*(no such file|cannot be read)"):
            read_list(path, 10)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "wrong.pt").write_bytes(b"nothing of torch's")
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "code.pt")
    for name in ("bytes", "wrong.pt", "code.pt"):
        with pytest.raises(ConfigError, match=r"draft_vocab .*cannot be read"):
            read_list(tmp_path / name, 10)


@pytest.mark.parametrize("value", [0, -3, True, 2.5, "", "  "])
def test_wrong_values(value):
    with pytest.raises(ConfigError, match="draft_vocab"):
        EngineConfig(draft_vocab=value)
