"""`headlong tune`: what it measures, what it stores, and who reads it."""

import argparse
import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from headlong.cli import counting, tune
from headlong.cli.options import Parser
from headlong.errors import ConfigError, HeadlongError
from headlong.llm import LLM
from headlong.speculate import frequencies, profile
from headlong.speculate.mtp import MtpProposer
from headlong.speculate.profile import Cost, Profile

CONDITIONS = {"model": "0123", "drafter": "auto", "dtype": "float32", "device": "cpu: x", "threads": 1}
COSTS = (Cost(1, 0, 0.004, 0.0), Cost(1, 3, 0.005, 0.003))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def parse(*words: str) -> argparse.Namespace:
    parser = Parser(prog="headlong")
    tune.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["tune", *words])


def test_measures_and_stores(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse("--rows", "2,1", "--steps", "2", "--dtype", "float32")
    assert args.execute(args) == 0
    shown = capsys.readouterr().out
    assert "K=8" in shown and "milliseconds" in shown
    stored = Path(shown.splitlines()[-1].removeprefix("stored in "))
    assert stored.is_relative_to(cache) and not list(stored.parent.glob("*.tmp"))
    engine = LLM(dtype="float32", max_rows=4).engine
    found = profile.load(engine.conditions)
    assert found is not None
    assert [(cost.rows, cost.depth) for cost in found.costs] == [(r, k) for r in (1, 2) for k in range(9)]
    assert all(cost.verify > 1e-5 and (cost.draft > 1e-5) == (cost.depth > 0) for cost in found.costs)
    # Drafting eight tokens takes longer than drafting one; the engine that starts now knows it.
    costs = engine.depths.costs
    assert costs.draft.at(1, 8) > 1.5 * costs.draft.at(1, 1)
    assert costs.verify.count(2, 0) > 0
    other = LLM(dtype="float64", max_rows=4).engine
    assert profile.load(other.conditions) is None and other.depths.costs.verify.count(2, 0) == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [(("--rows", "0,2"), "--rows"), (("--steps", "0"), "--steps"), (("--mtp", "off"), "nothing to tune")],
)
def test_wrong_flags(words: tuple[str, ...], reason: str) -> None:
    args = parse(*words)
    with pytest.raises(ConfigError, match=reason):
        args.execute(args)


def test_counts_texts_then_measures(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_text("The cat sat on the mat. " * 20)
    other.write_text("The end.\n")
    short = ("--rows", "1", "--steps", "1", "--dtype", "float32", "--draft-vocab", "40")
    args = parse(*short, "--text", str(text), "--text", str(other))
    assert args.execute(args) == 0
    shown = capsys.readouterr().out
    counted, stored = shown.splitlines()[0], Path(shown.splitlines()[1].removeprefix("stored in "))
    assert counted.startswith("counted ") and "100.0%" in counted and stored.is_relative_to(cache)
    llm = LLM(dtype="float32", max_rows=1, draft_vocab=40)
    tokenizer, proposer = llm.service.text.tokenizer, llm.engine.proposer
    assert tokenizer is not None and isinstance(proposer, MtpProposer)
    counts = Counter(tokenizer.encode(text.read_text()) + tokenizer.encode(other.read_text()))
    assert frequencies.load(tokenizer.fingerprint) == counts
    kept = proposer.vocabulary.tokens_T
    assert kept is not None and len(kept) == 40 and set(counts) <= set(kept.tolist())
    assert profile.load(llm.engine.conditions) is not None, "costs of drafting among so many"
    assert profile.load(LLM(dtype="float32", max_rows=1).engine.conditions) is None
    # Without texts, counts that are there stay.
    args = parse(*short)
    assert args.execute(args) == 0 and "most frequent tokens by" in capsys.readouterr().out
    assert frequencies.load(tokenizer.fingerprint) == counts


def test_without_texts_its_own_answers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "ANSWER_TOKENS", 12)
    llm = LLM(dtype="float32", max_rows=2)
    counting.count_and_store(llm, 100, [])
    assert llm.service.text.tokenizer is not None
    counts = frequencies.load(llm.service.text.tokenizer.fingerprint)
    assert counts is not None and 12 <= sum(counts.values()) <= 12 * 6


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--text", "x"), "--text counts tokens for --draft-vocab N"),
        (("--text", "x", "--draft-vocab", "list.json"), "--text counts"),
        (("--text", "/nowhere/x", "--draft-vocab", "9"), "--text /nowhere/x: cannot be read"),
        (("--text", "/dev/null", "--draft-vocab", "9"), "--text: nothing to count"),
        (("--draft-vocab", "/nowhere/list.json"), "draft_vocab '/nowhere/list.json': there is no such file"),
        (("--draft-vocab", "0"), "draft_vocab must be a whole number"),
    ],
)
def test_wrong_counting(words: tuple[str, ...], reason: str) -> None:
    args = parse(*words)
    with pytest.raises(ConfigError, match=reason):
        args.execute(args)


def test_no_head(tmp_path: Path) -> None:
    args = parse(str(tmp_path / "nothing"))
    with pytest.raises(HeadlongError):
        args.execute(args)


def test_a_profile_comes_back() -> None:
    assert profile.load(CONDITIONS) is None
    file = profile.save(Profile(CONDITIONS, COSTS))
    assert profile.load(CONDITIONS) == Profile(CONDITIONS, COSTS)
    assert profile.load(CONDITIONS | {"threads": 2}) is None
    profile.save(Profile(CONDITIONS, COSTS[:1]))
    assert [entry.name for entry in file.parent.iterdir()] == [file.name], "nothing else is left behind"
    found = profile.load(CONDITIONS)
    assert found is not None and found.costs == COSTS[:1]


def good() -> dict:
    entries = [{"rows": 1, "depth": 0, "verify": 0.1, "draft": 0.0}]
    return {"version": 1, "conditions": CONDITIONS, "costs": entries}


DAMAGED = {
    "cut": json.dumps(good())[:-9],
    "empty": "",
    "not an object": "[1, 2]",
    "deep": "[" * 100_000,
    "another version": json.dumps(good() | {"version": 2}),
    "other conditions": json.dumps(good() | {"conditions": CONDITIONS | {"threads": 8}}),
    "no costs": json.dumps(good() | {"costs": []}),
    "text": json.dumps(good()).replace("0.1", '"fast"'),
    "negative": json.dumps(good()).replace("0.1", "-0.1"),
    "not a number": json.dumps(good()).replace("0.1", "NaN"),
    "endless": json.dumps(good()).replace("0.1", "Infinity"),
    "unknown field": json.dumps(good()).replace('"depth"', '"breadth"'),
    "half a row": json.dumps(good()).replace('"rows": 1', '"rows": 1.5'),
    "huge": json.dumps(good()) + " " * profile.MAX_BYTES,
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_profile_is_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    file = profile.path_of(CONDITIONS)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert profile.load(CONDITIONS) is None
    assert len(caplog.records) == 1 and str(file) in caplog.text and "headlong tune" in caplog.text


def test_bytes_that_are_no_text(caplog: pytest.LogCaptureFixture) -> None:
    file = profile.path_of(CONDITIONS)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xff\xfe\x00")
    with caplog.at_level(logging.WARNING):
        assert profile.load(CONDITIONS) is None
    assert caplog.records
