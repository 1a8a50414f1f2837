"""The front's engine: many replicas as one `EngineClient`. Texts are cut and requests are made on this side; tokens are
computed by whichever replica has the call.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import groupby

from headlong.cluster.board import Board
from headlong.cluster.call import Call
from headlong.cluster.fleet import Fleet
from headlong.cluster.suspicion import Deaths
from headlong.cluster.wire import Facts
from headlong.completion import Chunk
from headlong.engine.client import EngineClient, EngineDescription, EngineStats, ReplicaStatus
from headlong.engine.requests import RequestMaker, check
from headlong.engine.texts import Texts
from headlong.errors import HeadlongError
from headlong.params import SamplingParams
from headlong.text.codec import TextCodec
from headlong.text.grammar import GrammarCompiler
from headlong.types import Request

SILENT_SECONDS = 15.0
"""After how long without a word of any replica the front says that it is not well. Requests wait all the same."""
IDLE_POLL_SECONDS = 0.05
CLOSED = "the engine has been closed"
DRAINING = "the engine is shutting down; it finishes what it has and takes nothing new"
Item = Chunk | BaseException


class ClusterEngine(EngineClient):
    """The replicas of one model. `texts` and `folder` are of this machine's copy of it, `facts` what a replica said of
    itself at the start."""

    def __init__(self, fleet: Fleet, board: Board, facts: Facts, folder: str, texts: Texts) -> None:
        self._fleet, self._board, self._texts, self._folder = fleet, board, texts, folder
        self._lock = threading.Lock()
        self._deaths = Deaths()
        self._facts, self._text, self._maker = facts, self._codec(facts), self._made_for(facts, None)
        self._ended: str | None = None
        self._open: dict[asyncio.Queue[Item], list[Call]] = {}

    @property
    def description(self) -> EngineDescription:
        """Describes the newest replica, with the rows of all."""
        alike = self._board.facts(self._facts.model) or [self._facts]
        rows = sum(one.description.max_rows for one in alike)
        return replace(self._current().description, folder=self._folder, max_rows=rows)

    @property
    def text(self) -> TextCodec:
        return self._text

    @property
    def failure(self) -> str | None:
        if self._ended is not None:
            return self._ended
        if self._board.trouble is not None:
            return f"no replica serves: {self._board.trouble}"
        silent = self._board.silent_seconds
        return f"no replica has answered for {silent:.0f} s" if silent > SILENT_SECONDS else None

    @property
    def hung(self) -> bool:
        return False  # a replica that hangs ends itself

    def stats(self) -> EngineStats:
        return self._board.stats()

    def replicas(self) -> Sequence[ReplicaStatus]:
        return self._board.replicas()

    def prepare(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, request_id: str
    ) -> list[Request]:
        self._current()
        maker, known = self._maker, self._facts.description
        groups = [
            maker.make(prompt, params, f"{request_id}/{number}") for number, prompt in enumerate(prompts)
        ]
        for group in groups:
            check(group[0], known.vocab_size, known.max_len)
        return [request for group in groups for request in group]

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Chunk, None]:
        if self._ended is not None:
            raise HeadlongError(self._ended)
        by_prompt = [list(group) for _, group in groupby(requests, lambda one: one.id.rpartition(".")[0])]
        calls = [Call(self._fleet, self._board, self._facts, group, self._deaths) for group in by_prompt]
        items: asyncio.Queue[Item] = asyncio.Queue()
        self._open[items] = calls
        tasks = [asyncio.create_task(_pump(call, items)) for call in calls]
        unfinished = len(requests)
        try:
            while unfinished:
                item = await items.get()
                if isinstance(item, BaseException):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            del self._open[items]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def cancel(self, request_ids: Sequence[str]) -> None:
        for calls in self._open.values():
            for call in calls:
                call.cancel(request_ids)
        self._fleet.cancel(request_ids)

    async def drain(self) -> None:
        self._ended = self._ended or DRAINING
        while self._open:
            await asyncio.sleep(IDLE_POLL_SECONDS)

    async def close(self) -> None:
        self._ended = self._ended or CLOSED
        self._board.close()
        for items in self._open:
            items.put_nowait(HeadlongError("the engine was closed before this request ended"))

    def _current(self) -> Facts:
        """What the newest replica says of itself. Replicas come and go; settings may change with them, the model does
        not."""
        known = self._board.facts(self._facts.model)
        with self._lock:
            if known and known[-1].description != self._facts.description:
                self._maker = self._made_for(known[-1], self._maker)
                self._facts, self._text = known[-1], self._codec(known[-1])
            return self._facts

    def _codec(self, facts: Facts) -> TextCodec:
        texts = self._texts
        return TextCodec(self._folder, texts.tokenizer, texts.template, facts.description.max_len)

    def _made_for(self, facts: Facts, before: RequestMaker | None) -> RequestMaker:
        description, tokenizer = facts.description, self._texts.tokenizer
        grammars = None if before is None else before.grammars
        if tokenizer is not None and grammars is None:
            grammars = GrammarCompiler(tokenizer, description.vocab_size, facts.eos_ids)
        return RequestMaker(self._folder, description.drafting, facts.eos_ids, grammars)


async def _pump(call: Call, items: "asyncio.Queue[Item]") -> None:
    try:
        async with contextlib.aclosing(call.chunks()) as chunks:
            async for chunk in chunks:
                items.put_nowait(chunk)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        items.put_nowait(error)
