"""One engine on a tiny model, the rows that come and go in it, and what each of them must give.

A row's truth is what it gives alone, without drafts, on an engine without a cache; truths are computed once for all
schedules. Knows how to drive an engine, not which schedule to drive it through.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import headlong.engine.proposers as proposers_module
import headlong.engine.service as service_module
from headlong import SamplingParams
from headlong.config import EngineConfig
from headlong.engine.build import build
from headlong.engine.faults import MAX_IN_A_ROW, NO_NUMBERS
from headlong.engine.service import Service
from headlong.speculate.depth import Wish
from headlong.types import Plan, Request, StepOutput
from support.injection import Injector

VOCAB = 97
MAX_TOKENS = 24
CONTEXT = 112
MAX_STEPS = 20_000

_RNG = random.Random(11)
_LONG = tuple(_RNG.randrange(VOCAB) for _ in range(80))
PROMPTS = (
    *(_LONG[:count] for count in (1, 2, 4, 5, 9, 16, 17, 31, 32, 33, 48, 49, 64, 65, 80)),
    (*_LONG[:16], 3, 5),
    (*_LONG[:40], 7),
    (*_LONG[:32], *_LONG[:32]),
    tuple(_RNG.randrange(VOCAB) for _ in range(50)),
    tuple(_RNG.randrange(VOCAB) for _ in range(3)) * 9,
)
"""Many begin alike, so that the cache has something to find; lengths lie about pages and verifications."""
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "logprobs": 1},
    {"temperature": 1.2, "top_k": 12, "stop_token_ids": tuple(range(6))},
    {"repetition_penalty": 1.4, "logprobs": 0},
    {"temperature": 0.8, "presence_penalty": 0.5, "min_tokens": 6, "stop_token_ids": tuple(range(12))},
    {"logit_bias": {4: 2.0}, "bad_token_ids": (9, 10), "temperature": 0.7, "top_p": 0.9},
)
_built: dict[tuple[Any, ...], Any] = {}
_truths: dict[tuple[Any, ...], tuple[tuple[int, ...], str]] = {}


def load(folder: Path, **options: Any) -> Service:
    """As a user would; but each model's weights are read once."""

    def build_once(blueprint: Any, **rest: Any) -> Any:
        key = (str(blueprint.checkpoint.folder), blueprint.head_refusal, rest.get("device"))
        if key not in _built:
            _built[key] = build(blueprint, **rest)
        return _built[key]

    config = EngineConfig(dtype="float64", page_size=16, max_context=CONTEXT, **options)
    with (
        mock.patch.object(service_module, "build", build_once),
        mock.patch.object(proposers_module, "build", build_once),
    ):
        return Service.load(folder, config)


@dataclass(frozen=True)
class Asked:
    """What a request is but for its drafting, which must not matter."""

    prompt: int
    kind: int
    max_tokens: int = MAX_TOKENS

    def request(
        self,
        row_id: str,
        draft_tokens: int = 0,
        adaptive: bool = False,
        priority: int = 0,
        tenant: str = "",
    ) -> Request:
        own = KINDS[self.kind]
        own = own | {"min_tokens": min(own.get("min_tokens", 0), self.max_tokens)}
        params = SamplingParams(max_tokens=self.max_tokens, seed=self.kind, priority=priority, **own)
        stops = frozenset(params.stop_token_ids)
        made = Request(
            row_id, PROMPTS[self.prompt], params, self.kind, 0, draft_tokens, adaptive, stop_ids=stops
        )
        return replace(made, tenant=tenant)


def truth(folder: Path, asked: Asked) -> tuple[tuple[int, ...], str]:
    """Tokens and finish reason, alone and plain. Shorter outputs are the beginnings of longer ones."""
    key = (folder, asked.prompt, asked.kind)
    if key not in _truths:
        engine = load(folder, prefix_cache=False, mtp="off", max_rows=1, chunk_tokens=512).engine
        engine.add(replace(asked, max_tokens=MAX_TOKENS).request("alone"))
        tokens, reason = [], ""
        while engine.has_work:
            for output in engine.step().rows:
                tokens.extend(output.token_ids)
                reason = output.finish_reason
        _truths[key] = (tuple(tokens), reason)
    tokens, reason = _truths[key]
    return tokens[: asked.max_tokens], "length" if len(tokens) > asked.max_tokens else reason


class RandomDepths:
    """Another depth for every row in every step, and drafts that end before it or are dropped again."""

    def __init__(self, seed: int) -> None:
        self.draft_stop = self
        self._rng = random.Random(seed)
        self._fixed: set[str] = set()

    def judge(self, row_ids: Sequence[str], confidences: Sequence[float]) -> tuple[list[bool], list[bool]]:
        assert len(row_ids) == len(confidences)
        kept = [row_id in self._fixed or self._rng.random() < 0.9 for row_id in row_ids]
        going = [row_id in self._fixed or self._rng.random() < 0.8 for row_id in row_ids]
        return kept, [both[0] and both[1] for both in zip(kept, going, strict=True)]

    def choose(self, wishes: Mapping[str, Wish], _num_prompt_tokens: int) -> Mapping[str, int]:
        self._fixed = {row_id for row_id, wish in wishes.items() if not wish.adaptive}
        return {
            row_id: self._rng.randint(0, wish.limit) if wish.adaptive else wish.limit
            for row_id, wish in wishes.items()
        }

    def observe(self, *_: Any) -> None:
        pass


@dataclass(eq=False)
class Armed:
    """A fault that waits for its stage: before or after its work, the next time or after it was spared a few times."""

    stage: str
    late: bool
    error: Callable[[], BaseException]
    spares: int = 0


@dataclass
class Living:
    """A row on its way."""

    asked: Asked
    expected: tuple[int, ...]
    reason: str
    cursed: bool
    faults_before: int
    tokens: list[int] = field(default_factory=list)


class World:
    """`step`, `join`, `cancel` keep book; every one of them ends in `check`."""

    def __init__(self, folder: Path, depth_seed: int | None, **options: Any) -> None:
        self.folder = folder
        self.engine = load(folder, **options).engine
        if depth_seed is not None:
            self.engine.depths = self.engine.scheduler.depths = RandomDepths(depth_seed)
        self.injector = Injector(self.engine, self._strike)
        self.injector.poison = self._poison
        self.armed: list[Armed] = []
        """The first that fits strikes, once."""
        self.poisons: list[float] = []
        self.living: dict[str, Living] = {}
        self.cancelled: set[str] = set()
        self.ended: dict[str, str] = {}
        self.harm = 0
        """Faults and poisonings so far."""
        self._count = 0

    def join(self, asked: Asked, cursed: bool = False, **drafting: Any) -> str:
        self._count += 1
        row_id = f"row{self._count}"
        expected, reason = truth(self.folder, asked)
        self.living[row_id] = Living(asked, expected, reason, cursed, self.harm)
        self.engine.add(asked.request(row_id, **drafting))
        self.check()
        return row_id

    def cancel(self, row_id: str) -> None:
        try:
            (output,) = self.engine.cancel(row_id).rows
            assert output.finish_reason == "cancelled"
        except KeyboardInterrupt:
            assert self.engine.scheduler.find(row_id) is None
        del self.living[row_id]
        self.cancelled.add(row_id)
        self.check()

    def step(self) -> None:
        try:
            self.take(self.engine.step())
        except KeyboardInterrupt:
            assert not self.engine.state.rows, "nothing half-written is kept"
            self.armed.clear()
            self.take(self.engine.step())
        if self.engine.failure is not None:
            assert not self.engine.has_work and not self.living, "everybody was told"
            self.engine.restart()
        self.check()

    def take(self, step: StepOutput) -> None:
        assert len({output.request.id for output in step.rows}) == len(step.rows), "a row was told of twice"
        for output in step.rows:
            row_id = output.request.id
            row = self.living[row_id]
            row.tokens.extend(output.token_ids)
            place = len(row.tokens)
            assert tuple(row.tokens) == row.expected[:place], (row_id, row.asked, "a token is wrong")
            if output.finish_reason == "error":
                self._check_error(row_id, row, str(output.stop_reason))
            elif output.finish_reason is not None:
                assert (place, output.finish_reason) == (len(row.expected), row.reason), (row_id, row.asked)
                assert not row.cursed, "every pass with it fails"
            if output.finish_reason is not None:
                self.ended[row_id] = output.finish_reason
                del self.living[row_id]

    def check(self) -> None:
        engine = self.engine
        engine.check_integrity()
        assert engine.faults.count <= self.harm, "a fault that nobody injected"
        waiting, running = engine.scheduler.waiting, engine.scheduler.running
        assert sorted(row.id for row in (*waiting, *running)) == sorted(self.living), "a row was lost"

    def finish(self) -> None:
        """Runs to the end; afterwards everything is free and nothing of any row is left."""
        self.armed.clear()
        self.poisons.clear()
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                break
            self.step()
        engine, state = self.engine, self.engine.state
        assert not self.living, "rows that never end"
        assert state.pages.num_free == state.pages.size and state.slots.num_free == state.slots.size
        assert not state.rows and all(request is None for request in engine.sampler.table.requests)
        state.drop_cache()
        engine.check_integrity()

    def close(self) -> None:
        self.injector.remove()

    def _check_error(self, row_id: str, row: Living, why: str) -> None:
        """Nobody ends for what somebody else did: it takes two poisonings, or several faults with the row in them;
        unless nothing works any more, the engine's own question included."""
        if "gave up after" in why:
            assert self.engine.failure is not None and self.harm > MAX_IN_A_ROW
            return
        needed = 2 if NO_NUMBERS in why else 3
        assert row.cursed or self.harm - row.faults_before >= needed, (row_id, why)

    def _strike(self, stage: str, late: bool, injector: Injector) -> BaseException | None:
        if stage == "forward" and not late and self._has_cursed(injector.plan):
            self.harm += 1
            return RuntimeError("this row breaks the kernel")
        armed = next((armed for armed in self.armed if (armed.stage, armed.late) == (stage, late)), None)
        if armed is None:
            return None
        armed.spares -= 1
        if armed.spares >= 0:
            return None
        self.armed.remove(armed)
        self.harm += 1
        return armed.error()

    def _has_cursed(self, plan: Plan) -> bool:
        rows = (self.living.get(row.request.id) for row in plan.rows)
        return any(row is not None and row.cursed for row in rows)

    def _poison(self, plan: Plan) -> Mapping[str, float]:
        rows = [row for row in plan.rows if row.samples and row.request.id in self.living]
        if not rows or not self.poisons:
            return {}
        self.harm += 1
        return {rows[self.harm % len(rows)].request.id: self.poisons.pop()}


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("out of memory")


def broken_kernel() -> Exception:
    return RuntimeError("the kernel broke")
