"""The fuzzers' targets on good input, on what was found before and on damage; atheris for a while in the slow tests,
where it is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import targets  # noqa: E402

SECONDS = 10
NAMES = tuple(targets.TARGETS)
FOUND = [(path.parent.name, path) for path in sorted(HERE.glob("found/*/*"))]


@pytest.mark.parametrize("name", NAMES)
def test_good_input(name: str) -> None:
    for seed in targets.seeds(name):
        targets.TARGETS[name](seed)


@pytest.mark.parametrize(("name", "file"), FOUND, ids=[f"{name}-{file.name}" for name, file in FOUND])
def test_what_was_found_before(name: str, file: Path) -> None:
    targets.TARGETS[name](file.read_bytes())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage(name: str, data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from(list(targets.seeds(name)))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole)))
        whole[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
    targets.TARGETS[name](bytes(whole))


def test_a_broken_promise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_cut", lambda data: [data[:1]])
    with pytest.raises(AssertionError):
        targets.sse(next(targets.seeds("sse")))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed; see `make fuzz`"
)
@pytest.mark.parametrize("name", NAMES)
def test_a_while_of_fuzzing(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(HERE / "run.py"),
            name,
            f"-max_total_time={SECONDS}",
            f"-artifact_prefix={tmp_path}/",
        ],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
