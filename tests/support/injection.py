"""Faults on demand at every point of an engine's steps, by replacing what the engine looks up when it calls it.

Knows the names of the stages; the engine knows nothing of this.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headlong.engine.engine import Engine
from headlong.engine.step import host
from headlong.types import Plan

STAGES = (
    "admit",
    "reserve",
    "choose",
    "propose",
    "batch",
    "context",
    "forward",
    "verify",
    "commit",
    "observe",
    "finish",
    "flush_deferred",
    "publish",
    "release",
    "learn",
)
"""In the order of a step; of a row that leaves what was deferred is written, and it is released."""


class Strike(Protocol):
    def __call__(self, stage: str, late: bool, injector: "Injector") -> Exception | None:
        """What this stage shall raise before its work or, `late`, after it; None for nothing."""
        ...


def nothing(_stage: str, _late: bool, _injector: "Injector") -> None:
    return None


class Injector:
    """Stands at every stage of one engine until it is removed. `raised` counts the faults, `steps` the steps."""

    def __init__(self, engine: Engine, strike: Strike = nothing) -> None:
        self.engine = engine
        self.strike = strike
        self.poison: Callable[[Plan], Mapping[str, float]] = lambda _plan: {}
        """Rows of the plan whose logits shall hold a value, and which."""
        self.plan = Plan((), 0)
        """What the step is about, from proposing on."""
        self.raised = self.steps = 0
        self._verify = host.verify
        self._replaced: list[tuple[Any, str]] = []
        for stage, (place, name) in self._places().items():
            self._replace(place, name, self._wrapped(stage, getattr(place, name)))
        self._replace(engine, "step", self._counted(engine.step))
        host.verify = self._wrapped("verify", self._verify)

    def remove(self) -> None:
        for place, name in self._replaced:
            delattr(place, name)
        host.verify = self._verify

    def _places(self) -> dict[str, tuple[Any, str]]:
        engine = self.engine
        graph = engine.steppers.graph
        whole = {} if graph is None else {name: (graph, name) for name in ("launch", "land")}
        return whole | {
            "admit": (engine.state, "admit"),
            "reserve": (engine.state, "reserve"),
            "choose": (engine.scheduler.depths, "choose"),
            "propose": (engine.proposer, "propose"),
            "batch": (engine.runner, "batch"),
            "context": (engine.runner, "context"),
            "forward": (engine.runner, "forward"),
            "commit": (engine.state, "commit"),
            "observe": (engine.proposer, "observe"),
            "finish": (engine.scheduler, "finish"),
            "flush_deferred": (engine.scheduler, "flush_deferred"),
            "publish": (engine.state, "publish"),
            "release": (engine.state, "release"),
            "learn": (engine.depths, "observe"),
        }

    def _replace(self, place: Any, name: str, by: Callable[..., Any]) -> None:
        if name not in vars(place):
            self._replaced.append((place, name))
        setattr(place, name, by)

    def _counted(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def counted() -> Any:
            self.steps += 1
            return step()

        return counted

    def _wrapped(self, stage: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if stage == "propose":
                self.plan = args[0]
            # Another engine's verdict, and freeing without keeping, which cannot fail.
            if (stage == "verify" and args[3] is not self.engine.sampler) or (
                stage == "release" and len(args) == 1
            ):
                return real(*args, **options)
            self._raise(stage, late=False)
            done = real(*args, **options)
            if stage == "propose":
                self.plan = self.plan.fitted(done)
            if stage == "forward":
                self._write_poison(done[1])
            self._raise(stage, late=True)
            return done

        return wrapped

    def _raise(self, stage: str, late: bool) -> None:
        error = self.strike(stage, late, self)
        if error is not None:
            self.raised += 1
            raise error

    def _write_poison(self, logits: Any) -> None:
        values = self.poison(self.plan)
        for first, row in zip(self.plan.first_logits, self.plan.rows, strict=True):
            if row.request.id in values and row.samples:
                logits[first, 13] = values[row.request.id]
