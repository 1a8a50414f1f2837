"""The engine of this process behind the protocol that servers use: `LocalEngine`, and how one is loaded to serve."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import torch

from headlong.completion import Chunk
from headlong.config import EngineConfig
from headlong.engine.client import EngineClient, EngineDescription, EngineStats, Usage
from headlong.engine.loop import EngineLoop, OnStep, Outlet
from headlong.engine.metrics import Metrics
from headlong.engine.service import Service
from headlong.engine.warmup import plain_tokens_per_second
from headlong.params import SamplingParams
from headlong.progress import ProgressFn, silent
from headlong.text.codec import TextCodec
from headlong.types import Request, StepOutput


class LocalEngine(EngineClient):
    """Steps a service's engine in a thread of its own. Nobody else may step that engine meanwhile.

    `on_step` sees every step, in the engine's thread.
    """

    def __init__(
        self,
        service: Service,
        on_step: OnStep | None = None,
        *,
        plain_tokens_per_second: float | None = None,
        step_timeout: float | None = None,
    ) -> None:
        self.service = service
        self._description = service.describe(plain_tokens_per_second)
        self._metrics = Metrics()
        self._on_step = on_step
        observe = self._metrics.observe if on_step is None else self._observe
        self._loop = EngineLoop(service, observe, step_timeout)

    @classmethod
    def load(
        cls,
        model: str | Path | None,
        config: EngineConfig,
        progress: ProgressFn = silent,
        on_step: OnStep | None = None,
    ) -> "LocalEngine":
        service = Service.load(model, config, progress)
        return cls(service, on_step, step_timeout=config.resolve_step_timeout())

    @property
    def description(self) -> EngineDescription:
        return self._description

    @property
    def text(self) -> TextCodec:
        return self.service.text

    @property
    def failure(self) -> str | None:
        return self._loop.ended

    @property
    def hung(self) -> bool:
        return self._loop.hung

    def stats(self) -> EngineStats:
        return EngineStats(
            usage=self._usage(),
            totals=self._metrics.totals(),
            recent=self._metrics.recent(),
            rates=self._metrics.rates(),
        )

    def prepare(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, request_id: str
    ) -> list[Request]:
        groups = [
            self.service.requests(prompt, params, f"{request_id}/{number}")
            for number, prompt in enumerate(prompts)
        ]
        for group in groups:
            self.service.engine.check(group[0])
        return [request for group in groups for request in group]

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Chunk, None]:
        outlet = Outlet(asyncio.get_running_loop(), asyncio.Queue())
        self._loop.submit(requests, outlet)
        unfinished = len(requests)
        try:
            while unfinished:
                item = await outlet.items.get()
                if isinstance(item, BaseException):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            if unfinished:
                self._loop.abandon([request.id for request in requests])

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._loop.cancel(request_ids)

    async def drain(self) -> None:
        await asyncio.to_thread(self._loop.drain)

    async def close(self) -> None:
        await asyncio.to_thread(self._loop.close)

    def prefix_keys(self, limit: int) -> list[bytes]:
        """The prefix cache's keys of the pages that are worth most to a router, at most `limit`, the last used first.
        Any thread may ask."""
        return self.service.engine.state.prefix.recent(limit)

    def _observe(self, step: StepOutput) -> None:
        self._metrics.observe(step)
        assert self._on_step is not None
        self._on_step(step)

    def _usage(self) -> Usage:
        scheduler, state = self.service.engine.scheduler, self.service.engine.state
        return Usage(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=state.pages.num_used,
            pages_total=state.pages.size,
            slots_used=state.slots.num_used,
            slots_total=state.slots.size,
        )


class LocalEngines:
    """Loads engines of this process for a server: each is checked and has run once before it serves."""

    def load(self, model: str | Path | None, config: EngineConfig, progress: ProgressFn) -> LocalEngine:
        service = Service.load(model, config, progress)
        service.recommended_params()  # a wrong generation_config.json is refused here, not with every request
        return LocalEngine(
            service,
            plain_tokens_per_second=plain_tokens_per_second(service),
            step_timeout=config.resolve_step_timeout(),
        )

    def reclaim(self) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
