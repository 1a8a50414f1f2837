"""Every way to run a step gives the same tokens for the same plans: the host, one CUDA graph, graphs around a grammar.

Without a GPU the kernels run in Triton's interpreter and a CUDA graph is a plain call, on a tiny model.
"""

from dataclasses import fields
from importlib.util import find_spec

import pytest
import torch

from headlong import SamplingParams
from headlong.config import EngineConfig
from headlong.engine.service import Service
from headlong.engine.step.steppers import Steppers
from support import tiny
from support.tiny import random_tokens

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_cuda.py has this for GPUs"),
]
WAYS = ("host", "graph", "grammar")
KINDS = ({"seed": 3}, {"temperature": 0.9, "top_k": 40, "seed": 3})


def test_every_way_is_named_here():
    assert tuple(field.name for field in fields(Steppers)) == WAYS


def run(folder, way: str, choice: dict, monkeypatch) -> tuple[dict[str, list[int]], list, int]:
    """Tokens by row, the plans of decoding rows, and how many of them this way took; prompts are the host's."""
    service = Service.load(
        folder, EngineConfig(device="cpu", dtype="float32", max_rows=2, max_context=96, page_size=16)
    )
    engine, plans, taken = service.engine, [], []

    def choose(plan):
        if any(row.known_tokens for row in plan.rows):
            return engine.steppers.host
        plans.append(plan)
        taken.append(way)
        return getattr(engine.steppers, way)

    monkeypatch.setattr(engine.steppers, "choose", choose)
    monkeypatch.setattr(engine.ahead, "offer", lambda _launch: None)  # every step is planned here
    asked = SamplingParams(max_tokens=5, ignore_eos=True, draft_tokens=2, **choice)
    found: dict[str, list[int]] = {}
    for number, length in enumerate((3, 2)):
        (request,) = service.requests(tuple(random_tokens(97, length, seed=number)), asked, f"row{number}")
        engine.add(request)
        found[request.id] = []
    while engine.has_work:
        for row in engine.step().rows:
            found[row.request.id].extend(row.token_ids)
    engine.check_integrity()
    assert not engine.faults.count
    return found, plans, len(taken)


@pytest.mark.parametrize("choice", KINDS, ids=["greedy", "sampled"])
def test_every_way_gives_the_same_tokens_for_the_same_plans(tmp_path, monkeypatch, choice):
    monkeypatch.setenv("HEADLONG_TRITON", "interpret")
    folder = tiny.make(tmp_path, seed=5, **tiny.LEAST).folder
    wanted, plans, steps = run(folder, "host", choice, monkeypatch)
    assert steps and any(plan.num_drafts == 2 for plan in plans)
    for way in WAYS[1:]:
        found, own, count = run(folder, way, choice, monkeypatch)
        assert found == wanted, way
        assert own == plans, way
        assert count == steps
