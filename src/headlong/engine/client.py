"""What a server needs of an engine, wherever that engine runs: `EngineClient`, and the values that it gives.

`engine/local.py` implements it for an engine in this process. All that goes in and out is a value that another process
could send: requests (but for a compiled grammar, which whoever steps the engine compiles anew), chunks, descriptions
and statistics. Knows no engine.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from headlong.completion import Chunk
from headlong.config import EngineConfig
from headlong.engine.memory import MemoryPlan
from headlong.engine.metrics import Rates, Totals
from headlong.engine.row import FAULT
from headlong.params import SamplingParams
from headlong.progress import ProgressFn
from headlong.text.codec import TextCodec
from headlong.types import Request

ReplicaState = Literal["ready", "draining", "lost"]
"""A draining replica ends what it has and takes nothing new; a lost one is gone, and what it ran went elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What drafting amounts to on one engine. All depths are numbers of tokens per step."""

    refusal: str | None
    """Why this engine cannot draft; None if it can."""
    adaptive: bool
    """Whether the engine chooses the depth of every step by itself where a request does not say."""
    wanted: int
    """The depth where a request does not say; the most that the engine chooses where it is adaptive."""
    usual: int
    """The depth to tell people of: an adaptive engine may choose another one for every step."""
    deepest: int
    """The most that a request may ask for."""


@dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """What does not change as long as an engine lives."""

    folder: str
    """Where the model's files are, on the machine of the engine."""
    max_len: int
    """Tokens of the longest sequence, prompt and output together."""
    vocab_size: int
    max_rows: int
    """Sequences that run at the same time; further ones wait."""
    device: str
    dtype: str
    drafting: Drafting
    memory: MemoryPlan
    conditions: Mapping[str, Any]
    """All that the costs of a step depend on: two engines are alike where these are equal."""
    recommended: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the checkpoint's authors suggest."""
    recommended_tokens: int | None = None
    """How long they suggest that an answer may get."""
    plain_tokens_per_second: float | None = None
    """The speed of plain decoding with one row, measured when the engine was loaded; None where nobody measured."""

    slow: str | None = None
    """What it costs that the engine's machine lacks something, and how to get it; None where it lacks nothing."""

    def recommended_params(self) -> SamplingParams:
        """What the checkpoint's authors suggest, as a request that says nothing is sampled."""
        length: dict[str, Any] = {}
        if self.recommended_tokens is not None:
            length["max_tokens"] = self.recommended_tokens
        return SamplingParams(**(length | dict(self.recommended)))


@dataclass(frozen=True)
class Usage:
    """How full an engine is at one moment."""

    running: int
    waiting: int
    pages_used: int
    pages_total: int
    slots_used: int
    slots_total: int


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What an engine has done and is doing, read at one moment."""

    usage: Usage
    totals: Totals
    """Since the engine was loaded."""
    recent: Totals
    """Over the last seconds."""
    rates: Rates


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """One of several engines that serve the same model behind one client, as it was when it last told of itself."""

    id: str
    """Unlike any other replica's, those that are gone included."""
    state: ReplicaState
    node: str = ""
    """The machine it runs on."""
    started: float
    """When it began to serve, in seconds since 1970."""
    stats: EngineStats | None = None
    """None as long as it has told nothing."""
    requests: int = 0
    """Sequences that it has been given."""
    taken_over: int = 0
    """The sequences among them that another replica had begun and could not end: streams that were resumed."""
    repeated: int = 0
    """The sequences among them that another replica had been given without a token coming of it."""
    why: str = ""
    """For a lost one, what is known of its end."""


class EngineClient(Protocol):
    """One engine, as its users see it. Properties, `stats` and `cancel` answer at once, with what is known here;
    `prepare` may take a while and belongs in a worker thread."""

    @property
    def description(self) -> EngineDescription: ...

    @property
    def text(self) -> TextCodec:
        """The model's tokenizer and template, held on this side: texts are cut and shown without asking the engine."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine takes nothing more; None while it is well. An engine that fails begins anew by itself; this
        tells of failures that could not be mended so, and of an end that was asked for."""
        ...

    @property
    def hung(self) -> bool:
        """Whether a step of the engine does not end, so that nothing but the end of its process frees what it holds."""
        return False

    def stats(self) -> EngineStats: ...

    def replicas(self) -> Sequence[ReplicaStatus]:
        """The engines behind this client where it stands before several, the oldest first, and the last of those that
        were lost; none where there is one engine only."""
        return ()

    def prepare(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, request_id: str
    ) -> list[Request]:
        """Requests for `params.n` continuations of every prompt, prompt by prompt. Raises a RequestError that names
        the field for all that could never run, before anything is queued. Compiling a grammar may take a second."""
        ...

    def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Chunk, None]:
        """Submits the requests when the first chunk is asked for and yields what each step adds to each of them, until
        all have ended. Closing the generator earlier cancels what is left and frees all that it held."""
        ...

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Ends requests; their streams get a last chunk with the finish reason `cancelled`. Ids that are not known, or
        of requests that have ended, are no error."""
        ...

    async def drain(self) -> None:
        """Takes nothing new and returns when all that was submitted has ended."""
        ...

    async def close(self) -> None:
        """Ends the engine; streams that are still open end with an error. May be called more than once."""
        ...


class EngineLoader(Protocol):
    """Whoever makes the engines of a server: in this process, in others, on other machines."""

    def load(self, model: str | Path | None, config: EngineConfig, progress: ProgressFn) -> EngineClient:
        """An engine that is ready to serve. Takes its time: not for an event loop."""
        ...

    def reclaim(self) -> None:
        """Called after a client was closed and let go of: gives back the memory that its engine held."""
        ...


def is_engine_fault(why: str) -> bool:
    """Whether the sentence that ended a request tells of a fault of the engine; other errors are the request's own."""
    return why.startswith(FAULT)
