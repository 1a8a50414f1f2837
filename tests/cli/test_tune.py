"""`headlong tune`: what it measures, what it stores, and who reads it."""

import argparse
import json
import logging
from pathlib import Path

import pytest

from headlong.cli import tune
from headlong.cli.options import Parser
from headlong.errors import ConfigError, HeadlongError
from headlong.llm import LLM
from headlong.speculate import profile
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
