"""The asynchronous front end: prompts in, streams out on the event loop, over any engine."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from headlong.completion import Chunk, Completion
from headlong.config import EngineConfig
from headlong.engine.client import EngineClient
from headlong.engine.local import LocalEngine
from headlong.engine.loop import OnStep
from headlong.params import SamplingParams
from headlong.progress import ProgressFn, silent
from headlong.text.codec import Message, Prompt
from headlong.types import Request


class AsyncLLM:
    """Many streams over one engine. Start it with `await AsyncLLM.load(...)`, end it with `await close()`."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    @classmethod
    async def load(
        cls,
        model: str | Path | None = None,
        *,
        progress: ProgressFn = silent,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> "AsyncLLM":
        """Loads a model into this process, off the event loop; options are those of `EngineConfig`. `on_step` sees
        every step, in the engine's thread."""
        config = EngineConfig(**options)
        return cls(await asyncio.to_thread(LocalEngine.load, model, config, progress, on_step))

    async def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Yields what each step adds. Leaving the loop early cancels the rest and frees its pages at once."""
        params = params or self.client.description.recommended_params()
        requests = await asyncio.to_thread(self._requests, prompt, params, template)
        async with contextlib.aclosing(self.client.stream(requests)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def generate(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Completion:
        """Returns the whole completion; with `n > 1` the further ones are in its `.choices`."""
        done: dict[int, Completion] = {}
        async for chunk in self.stream(prompt, params, **template):
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
        return Completion.joined([done[index] for index in sorted(done)])

    def _requests(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams, template: dict[str, Any]
    ) -> list[Request]:
        """Makes the requests of a prompt, off the event loop, since encoding a long prompt or compiling a grammar takes
        a while. Their ids are random, because others may use the same engine."""
        if not isinstance(prompt, Sequence) or not prompt or isinstance(prompt[0], (str, int)):
            tokens = self.client.text.encode(prompt)  # type: ignore[arg-type]
        else:
            tokens = self.client.text.encode_chat(prompt, **template)  # type: ignore[arg-type]
        return self.client.prepare([tokens], params, f"async-{secrets.token_hex(8)}")

    @property
    def failure(self) -> str | None:
        """Why the engine takes nothing more; None while it is well."""
        return self.client.failure

    async def close(self) -> None:
        """Ends the engine; streams still open end with an error."""
        await self.client.close()
