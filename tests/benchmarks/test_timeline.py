"""A step's picture: kernels are told apart, time adds up, gaps stay gaps. On a trace made here, and on a CPU's."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from headlong import LLM, SamplingParams
from headlong.progress import silent
from stages import take_down
from timeline import COLOURS, IDLE, LEFT, STAGE, STEP, Block, Timeline, draw, kind_of, merged

BEGIN = 5_000_000.0
STAGES = {"propose": (10, 100), "forward": (120, 200), "verify": (200, 2000), "observe": (2010, 2050)}
KERNELS = (
    # name, launched at, runs from, to
    ("gemm_kernel", 20, 60, 110),  # the head's
    ("gemm_kernel", 130, 150, 650),
    ("epilogue_kernel", 130, 650, 700),
    ("attend_kernel", 130, 700, 900),
    ("delta_rule_kernel", 130, 900, 1000),
    ("_rms_norm_kernel", 130, 1000, 1010),
    ("_silu_mul_kernel", 130, 1010, 1030),
    ("vectorized_elementwise_kernel", 130, 1030, 1040),
    ("_argmax_of_part_kernel", 210, 1500, 1520),
    ("_rms_norm_kernel", 2020, 2100, 2110),  # the head reads the pair
)


def event(name: str, category: str, start: float, end: float, **args) -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": BEGIN + start, "dur": end - start, "args": args}


def recorded() -> list[dict]:
    """Shaped as the profiler exports it, microseconds, in no order; one launch may stand for many kernels."""
    events = [
        {"ph": "M", "name": "process_name"},
        event(STEP, "user_annotation", 0, 2060),
        *(event(f"{STAGE}{name}", "user_annotation", *span) for name, span in STAGES.items()),
        event("cudaStreamSynchronize", "cuda_runtime", 220, 1900, correlation=999),
        event("gemm_kernel", "kernel", -400, -300, correlation=1),  # of the step before
        event("cuLaunchKernel", "cuda_driver", -500, -490, correlation=1),
    ]
    launches = {}
    for name, launched, start, end in KERNELS:
        if launched not in launches:
            launches[launched] = 100 + launched
            call = event(
                "cudaGraphLaunch", "cuda_runtime", launched, launched + 5, correlation=100 + launched
            )
            events.insert(0, call)
        events.insert(0, event(name, "kernel", start, end, correlation=launches[launched]))
    return events


@pytest.fixture(scope="module")
def step() -> Timeline:
    return Timeline.of(recorded())


def test_time_by_kind(step):
    assert step.by_kind() == pytest.approx(
        {
            "products": 0.550,
            "attention": 0.200,
            "delta rule": 0.100,
            "norms, gates": 0.030,
            "drafts, head": 0.060,
            "verdict": 0.020,
            "copies, other": 0.010,
            "idle": 2.110 - 0.970,
        }
    )
    assert (step.host, step.length) == pytest.approx((2.060, 2.110)), "the device ends after the host"


def test_stages_and_waits(step):
    assert [(one.kind, round(one.start, 3), round(one.end, 3)) for one in step.stages] == [
        (name, start / 1e3, end / 1e3) for name, (start, end) in STAGES.items()
    ]
    assert [(round(one.start, 3), round(one.end, 3)) for one in step.waits] == [(0.22, 1.9)]


def test_a_kernel_that_waits_for_the_one_before_it_is_not_busy():
    """Which is there early: it counts from the other's end."""
    kernels = (("gemm_kernel", 1000, 3000), ("attend_kernel", 1500, 4000), ("_rms_norm_kernel", 6000, 7000))
    events = [
        event(STEP, "user_annotation", 0, 9000),
        event("cudaGraphLaunch", "cuda_runtime", 10, 20, correlation=1),
        *(event(name, "kernel", start, end, correlation=1) for name, start, end in kernels),
    ]
    step = Timeline.of(events)
    assert [(block.start, block.end) for block in step.device] == [(1, 3), (3, 4), (6, 7)]
    assert step.busy == 4 and step.by_kind()["attention"] == 1


@pytest.mark.parametrize(
    ("name", "stage", "kind"),
    [
        ("gemm_kernel", "forward", "products"),
        ("gemm_kernel", None, "products"),
        ("gemm_kernel", "propose", "drafts, head"),
        ("combine_kernel", "forward", "attention"),
        ("token_inputs_kernel", "forward", "delta rule"),
        ("_argmax_of_parts_kernel", "forward", "verdict"),
        ("index_elementwise_kernel", "commit", "verdict"),
        ("Memcpy DtoD", "batch", "copies, other"),
    ],
)
def test_kinds(name, stage, kind):
    assert kind_of(name, stage) == kind


def test_only_neighbours_of_one_kind_become_one():
    blocks = [Block("a", 0, 1), Block("a", 1.05, 2), Block("b", 2, 3), Block("a", 3, 4), Block("a", 5, 6)]
    assert merged(blocks, 0.1) == [Block("a", 0, 2), Block("b", 2, 3), Block("a", 3, 4), Block("a", 5, 6)]


def rectangles(picture: str, colour: str) -> list[tuple[float, float, float]]:
    """(x, y, width)"""
    found = ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect")
    return [
        tuple(float(one.attrib[k]) for k in ("x", "y", "width"))
        for one in found
        if one.attrib["fill"] == colour
    ]


def test_the_picture(step):
    plain = Timeline((), (), (Block("attention", 0.0, 1.0), Block("attention", 1.5, 2.0)), 2.0, 1.0)
    picture = draw({"plain": plain, "K=3": step}, "a <caption>")
    assert "a &lt;caption&gt;" in picture and "plain: 2.00 ms, device idle 0.50 ms (25%)" in picture
    first, second, *_ = rectangles(picture, COLOURS["attention"])
    assert first[0] == LEFT and first[2] == pytest.approx(2 * second[2], rel=0.01)
    gap = second[0] - first[0] - first[2]
    assert gap == pytest.approx(second[2], rel=0.01), "half a millisecond of nothing, on the same scale"
    tops = {y for _, y, width in rectangles(picture, IDLE) if width > 100}
    assert len(tops) == 6, "host, device and a part of it, for two steps"


def test_a_step_of_the_cpu():
    """The engine's own stages, by the profiler itself; no device, so all of it is idle."""
    llm = LLM(mtp="on", max_rows=1, max_context=256, progress=silent)
    (request,) = llm.service.requests(
        (5, 6, 7), SamplingParams(max_tokens=60, draft_tokens=2, ignore_eos=True), "a"
    )
    llm.engine.add(request)
    for _ in range(3):
        llm.engine.step()
    step = take_down(llm.engine, [ProfilerActivity.CPU])
    names = [stage.kind for stage in step.stages]
    assert names == [
        "plan",
        "propose",
        "batch",
        "context",
        "forward",
        "verify",
        "commit",
        "observe",
        "finish",
    ]
    assert all(a.end <= b.start for a, b in zip(step.stages, step.stages[1:], strict=False))
    assert step.device == () and step.by_kind()["idle"] == step.length > 0
    ET.fromstring(draw({"K=2": step}, "cpu"))
    assert llm.engine.scheduler.plan.__name__ == "plan", "the stages are themselves again"
