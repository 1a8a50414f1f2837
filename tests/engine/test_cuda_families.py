"""Every family on a GPU: logits are those of the CPU, to rounding; cuts of a sequence and drafts change no bit; and the
tokens of a batch are the same at every depth, in whole steps and by parts, with few pages and beginnings that are
found.

Prompts are shorter and longer than windows, than what makes an entry and than a chunk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine_cases import drive, requests_of
from headlong import LLM, SamplingParams
from headlong.engine.step.device_stepper import DeviceStepper
from headlong.types import Request
from support import cuda_families
from support.cuda_families import CASES, PARTLY_BFLOAT16, random_words
from support.steps import CPU, Driver, load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
LENGTHS = (1, 9, 37, 150)
"""Of prompts that begin alike."""
ROOM: dict[str, Any] = {"page_size": 16, "chunk_tokens": 48, "max_context": 256, "max_rows": 4}
MAX_TOKENS = 40


@pytest.fixture(scope="module", params=CASES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory) -> Path:
    return cuda_families.folder_of(name, tmp_path_factory.mktemp("tiny"))


def in_steps(driver: Driver) -> torch.Tensor:
    """Logits of a prompt in chunks, then of drafts: all refused, some accepted, all accepted."""
    found = [driver.feed("a", [7, 60, 70]).logits]
    for depth, accept in ((2, 0), (3, 2), (2, 2), (1, 0), (3, 3)):
        found.append(driver.step(driver.draft("a", depth, accept, seed=depth))["a"].logits)
    return torch.cat(found)


def driver_of(folder: Path, dtype: str, device: torch.device) -> Driver:
    built = load(folder, dtype, device=device, mtp="on")
    assert device == CPU or built.model.capturable, getattr(built.ops, "foreign", "")
    driver = Driver(built, max_rows=2)
    driver.open("a", random_words(170, seed=1))
    return driver


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuts_and_drafts_change_no_bit(name: str, folder: Path, dtype: str) -> None:
    """And in float32 logits and drafts are those of the CPU."""
    drafted, plain = (driver_of(folder, dtype, CUDA) for _ in range(2))
    found = in_steps(drafted)
    single = [plain.feed("a", [120]).logits, plain.decode("a", len(found) - 120).logits]
    assert torch.equal(found, torch.cat(single))
    assert drafted.propose("a", 3) == plain.propose("a", 3)
    if dtype == "float32" and name not in PARTLY_BFLOAT16:
        here = driver_of(folder, dtype, CPU)
        torch.testing.assert_close(found.cpu(), in_steps(here), rtol=1e-4, atol=1e-4)
        assert drafted.propose("a", 3) == here.propose("a", 3)


def asked(llm: LLM, depth: int | None) -> list[Request]:
    """Greedy and sampled rows by turns."""
    beginning = random_words(max(LENGTHS), seed=0)
    cases = [
        (
            (*beginning[: length - 1], number),
            replace(SAMPLED, temperature=0.9 * (number % 2), seed=number),
        )
        for number, length in enumerate(LENGTHS)
    ]
    return [
        replace(request, draft_tokens=depth or 0, adaptive=depth is None)
        for request in requests_of(llm, cases)
    ]


SAMPLED = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_are_the_same_at_every_depth(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folder, device="cuda", dtype=dtype, mtp="on", prefix_cache=False, **ROOM)
    whole, honest = [], DeviceStepper.launch
    monkeypatch.setattr(
        DeviceStepper, "launch", lambda self, plan, **how: whole.append(how) or honest(self, plan, **how)
    )

    def found(llm: LLM, depth: int | None) -> Any:
        trace = drive(llm, asked(llm, depth))
        assert not llm.engine.faults.count
        return trace

    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        wanted = found(llm, 0).results
        assert found(llm, 3).results == wanted, "by parts"
    accepted = 0
    for depth in (0, 1, 3, 3, None):  # a shape is recorded when it comes again
        whole.clear()
        trace = found(llm, depth)
        assert trace.results == wanted, f"K={depth}"
        assert {"goes_on": True} in whole, "no step was launched before the one before it was read"
        accepted += sum(output.num_accepted for output in trace.outputs)
    assert accepted
    del llm
    cramped = LLM(folder, device="cuda", dtype=dtype, mtp="on", cache_tokens=256, **ROOM)
    traces = [found(cramped, depth) for depth in (3, 0, 1)]
    assert all(trace.results == wanted for trace in traces)
    assert traces[0].preempted, "there were pages for all"
    assert any(output.num_cached for output in traces[1].outputs), "nothing was kept"
