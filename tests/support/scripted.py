"""An engine client without an engine: it says what a script says. For tests of what stands on the protocol alone."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path

from headlong.checkpoint.source import EMBEDDED
from headlong.completion import Chunk, Completion, MtpStatus, Stats
from headlong.config import EngineConfig
from headlong.engine.client import (
    Drafting,
    EngineDescription,
    EngineStats,
    MemoryPlan,
    Rates,
    ReplicaStatus,
    Totals,
    Usage,
)
from headlong.errors import HeadlongError, RequestError
from headlong.params import SamplingParams
from headlong.progress import ProgressFn
from headlong.text.codec import TextCodec
from headlong.text.stream import Detokenizer
from headlong.text.template import ChatTemplate
from headlong.text.tokenizer import Tokenizer
from headlong.types import FinishReason, Request

MAX_LEN, MAX_ROWS = 512, 4
MEMORY = MemoryPlan(
    device="nowhere",
    device_bytes=None,
    limit_bytes=None,
    target_bytes=1000,
    head_bytes=100,
    drafter_bytes=0,
    kv_bytes=10,
    slot_bytes=1,
    checkpoint_bytes=0,
    reserve_bytes=0,
    num_pages=8,
    page_size=64,
    num_slots=MAX_ROWS,
    max_len=MAX_LEN,
)


class ScriptedEngine:
    """Answers every request with `answer`, or what that makes of the prompt's text, two tokens a step. The texts are
    the embedded model's tokenizer's."""

    def __init__(
        self,
        answer: str | Callable[[str], str],
        *,
        pause: float = 0.0,
        drafting_refusal: str | None = None,
        max_len: int = MAX_LEN,
    ) -> None:
        tokenizer = Tokenizer.from_folder(Path(EMBEDDED))
        assert tokenizer is not None and tokenizer.chat_template is not None
        self._tokenizer, self._answer, self._pause = tokenizer, answer, pause
        template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        self.text = TextCodec("nowhere", tokenizer, template)
        self.description = EngineDescription(
            folder="nowhere",
            max_len=max_len,
            vocab_size=tokenizer.vocab_size,
            max_rows=MAX_ROWS,
            device="nowhere",
            dtype="bfloat16",
            drafting=Drafting(refusal=drafting_refusal, adaptive=True, wanted=8, usual=3, deepest=8),
            memory=MEMORY,
            conditions={},
            recommended={"temperature": 0.25},
            plain_tokens_per_second=100.0,
        )
        self.failure: str | None = None
        self.seen: list[Request] = []
        self.open: set[str] = set()
        self.cancelled: set[str] = set()
        self.closed = False
        self.others: list[ReplicaStatus] = []
        """The replicas that it stands before."""
        self._totals = Totals()

    def stats(self) -> EngineStats:
        usage = Usage(len(self.open), 0, 2, 8, len(self.open), MAX_ROWS)
        return EngineStats(
            usage=usage, totals=self._totals, recent=Totals(), rates=Rates(0.0, 0.0, 0.0, None, None, None)
        )

    def replicas(self) -> Sequence[ReplicaStatus]:
        return self.others

    def prepare(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, request_id: str
    ) -> list[Request]:
        for prompt in prompts:
            if len(prompt) >= self.description.max_len:
                raise RequestError(
                    f"prompt has {len(prompt)} tokens; this engine's context is {self.description.max_len}"
                )
        return [
            Request(f"{request_id}/{number}.{choice}", prompt, params, params.seed or 0, choice)
            for number, prompt in enumerate(prompts)
            for choice in range(params.n)
        ]

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Chunk, None]:
        if self.failure is not None:
            raise HeadlongError(self.failure)
        ids = {request.id for request in requests}
        self.seen.extend(requests)
        self.open |= ids
        try:
            for turn in itertools.zip_longest(*(self._chunks(request) for request in requests)):
                await asyncio.sleep(self._pause)
                for chunk in turn:
                    if chunk is not None:
                        yield chunk
        finally:
            self.open -= ids

    def cancel(self, request_ids: Sequence[str]) -> None:
        self.cancelled |= set(request_ids)

    async def drain(self) -> None:
        self.failure = "draining"

    async def close(self) -> None:
        self.closed = True

    def _chunks(self, request: Request) -> Iterator[Chunk]:
        answer = self._answer
        if callable(answer):
            answer = answer(self._tokenizer.decode(request.prompt, skip_special_tokens=False))
        tokens = self._tokenizer.encode(answer, add_special_tokens=False)[: request.params.max_tokens]
        reason: FinishReason = "length" if len(tokens) == request.params.max_tokens else "stop"
        pairs = [tuple(tokens[at : at + 2]) for at in range(0, len(tokens), 2)]
        told, detokenizer = "", Detokenizer(self._tokenizer)
        for number, pair in enumerate(pairs):
            last = number == len(pairs) - 1
            text = detokenizer.push(pair) + (detokenizer.flush() if last else "")
            told += text
            self._totals.generated_tokens += len(pair)
            yield Chunk(
                index=request.choice,
                text=text,
                token_ids=pair,
                from_draft=(True,) * (len(pair) - 1) + (False,),
                num_drafted=1,
                num_accepted=len(pair) - 1,
                finish_reason=reason if last else None,
                request_id=request.id,
                completion=self._completion(request, told, tuple(tokens), reason) if last else None,
            )

    def _completion(
        self, request: Request, text: str, tokens: tuple[int, ...], reason: FinishReason
    ) -> Completion:
        steps = len(tokens) // 2
        stats = Stats(
            steps=steps,
            tokens_per_step=2.0,
            drafted=steps,
            accepted=steps,
            tried_per_position=(steps,),
            accepted_per_position=(steps,),
            prompt_tokens=len(request.prompt),
            cached_tokens=0,
            prompt_seconds=0.1,
            decode_seconds=0.1,
            mtp=MtpStatus(True),
        )
        return Completion(text, tokens, None, reason, None, stats, request.choice)


class ScriptedEngines:
    """Hands out engines that were made beforehand, and remembers what was asked for."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self._engines = iter(engines)
        self.asked: list[tuple[str | Path | None, EngineConfig]] = []
        self.reclaimed = 0

    def load(self, model: str | Path | None, config: EngineConfig, progress: ProgressFn) -> ScriptedEngine:
        self.asked.append((model, config))
        progress("script", 1, 1)
        return next(self._engines)

    def reclaim(self) -> None:
        self.reclaimed += 1
