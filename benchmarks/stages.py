"""Takes one step of an engine down with torch's profiler, its stages by name. Draws nothing."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headlong.engine.engine import Engine
from headlong.engine.step import host
from timeline import STAGE, STEP, Timeline


def stages_of(engine: Engine) -> tuple[tuple[Any, str], ...]:
    """Who has each stage of a step that goes by parts, and its name."""
    return (
        (engine.scheduler, "plan"),
        (engine.proposer, "propose"),
        (engine.runner, "batch"),
        (engine.runner, "context"),
        (engine.runner, "forward"),
        (host, "verify"),
        (engine.state, "commit"),
        (engine.proposer, "observe"),
        (engine.scheduler, "finish"),
    )


@contextlib.contextmanager
def annotated(engine: Engine) -> Iterator[None]:
    """Puts the stages of a step into the profiler's record, those that there are."""
    found = [(owner, name, getattr(owner, name)) for owner, name in stages_of(engine) if hasattr(owner, name)]
    for owner, name, function in found:
        setattr(owner, name, _noted(function, name))
    try:
        yield
    finally:
        for owner, name, function in found:
            setattr(owner, name, function)


def _noted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"{STAGE}{name}"):
            return function(*args, **kwargs)

    return run


def take_down(engine: Engine, activities: list[ProfilerActivity]) -> Timeline:
    """The engine's next step but one: the first one under the profiler pays for its start."""
    with annotated(engine):
        _profiled(engine, activities)
        profiler = _profiled(engine, activities)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return Timeline.of(json.loads(file.read_text())["traceEvents"])


def _profiled(engine: Engine, activities: list[ProfilerActivity]) -> profile:
    with profile(activities=activities) as profiler:
        with record_function(STEP):
            engine.step()
        if ProfilerActivity.CUDA in activities:
            torch.cuda.synchronize()
    return profiler
