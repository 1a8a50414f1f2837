"""One request on its way through the engine, the same for every dialect.

A dialect hands in prompts and sampling; it gets pieces as they come (text split into reasoning, content and tool
calls) and at the end a `Result`. Knows no wire format. Leaving early, for whatever reason, cancels the rows.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from headlong.completion import Chunk, Completion
from headlong.engine.client import is_engine_fault
from headlong.params import SamplingParams
from headlong.server.blocks import Blocks, Change
from headlong.server.errors import ApiError
from headlong.server.model import Model
from headlong.text.output import Content, OutputEvent, OutputReader
from headlong.types import Request


@dataclass(frozen=True)
class Job:
    """What every dialect reduces its request to. Choice `i` of prompt `p` is number `p * n + i` of all."""

    id: str
    endpoint: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    make_parser: Callable[[], OutputReader] | None = None
    """Makes the parser of an output; None where the whole text is the content."""
    tenant: str = ""
    """The caller whose request it is: the engine shares itself fairly between tenants."""


@dataclass(frozen=True)
class Piece:
    """What one step added to one choice."""

    index: int
    events: tuple[OutputEvent, ...]
    changes: list[Change]
    """How the step changed the choice's blocks."""
    chunk: Chunk


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass
class Choice:
    """Everything that one choice has produced so far."""

    index: int
    blocks: Blocks = field(default_factory=Blocks)
    completion: Completion | None = None

    @property
    def reasoning(self) -> str:
        return self.blocks.texts("reasoning")

    @property
    def content(self) -> str:
        return self.blocks.texts("text")

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [
            ToolCall(block.call_id, block.name, block.text) for block in self.blocks if block.type == "call"
        ]

    @property
    def done(self) -> Completion:
        assert self.completion is not None, "asked for before the end"
        return self.completion

    def take(self, events: tuple[OutputEvent, ...], chunk: Chunk) -> Piece:
        """Adds what one step gave to one choice."""
        self.completion = chunk.completion
        return Piece(self.index, events, self.blocks.take(events), chunk)


@dataclass
class Result:
    """All choices of a request, and when each thing happened, in seconds since the request came."""

    choices: list[Choice]
    num_prompts: int
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    seconds: float = 0.0

    @property
    def completions(self) -> list[Completion]:
        return [choice.done for choice in self.choices]


class Generation:
    """Generates the rows of one job. Iterate `pieces` once; `result` is whole when they have ended."""

    def __init__(
        self, model: Model, requests: list[Request], parsers: Sequence[OutputReader | None], num_prompts: int
    ) -> None:
        self.model = model
        self._requests = requests
        self._index_of = {request.id: index for index, request in enumerate(requests)}
        self._parsers = parsers
        self.result = Result([Choice(index) for index in range(len(requests))], num_prompts)

    @classmethod
    def prepare(cls, model: Model, job: Job) -> "Generation":
        """Checks everything that can be wrong, before anything is queued. Takes a while: not for the event loop."""
        made = model.client.prepare(job.prompts, job.params, job.id)
        requests = [replace(request, tenant=job.tenant) for request in made]
        parsers = [None if job.make_parser is None else job.make_parser() for _ in requests]
        return cls(model, requests, parsers, len(job.prompts))

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        result = self.result
        async with contextlib.aclosing(self.model.client.stream(self._requests)) as chunks:
            async for chunk in chunks:
                if result.first_token is None and chunk.token_ids:
                    result.first_token = time.perf_counter() - result.started
                index = self._index_of[chunk.request_id]
                choice = result.choices[index]
                if chunk.finish_reason == "error":
                    choice.completion = chunk.completion
                    raise _error(str(choice.done.stop_reason))
                yield choice.take(self._parse(index, chunk), chunk)
        result.seconds = time.perf_counter() - result.started

    def _parse(self, index: int, chunk: Chunk) -> tuple[OutputEvent, ...]:
        parser = self._parsers[index]
        if parser is None:
            return (Content(chunk.text),) if chunk.text else ()
        events = parser.push(chunk.text) if chunk.text else []
        if chunk.finish_reason is not None:
            events += parser.finish()
        return tuple(events)


def _error(why: str) -> ApiError:
    """A fault of the engine is no fault of the request."""
    if is_engine_fault(why):
        return ApiError(500, why, type="server_error", code="engine_fault")
    return ApiError(400, f"the output could not go on: {why}")
