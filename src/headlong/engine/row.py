"""One sequence as the host sees it: its tokens, its text and when it ends. Holds no tensors."""

import contextlib
import time

from headlong.engine.prompt_reading import PromptReading
from headlong.text.stream import TextStream
from headlong.text.tokenizer import Tokenizer
from headlong.types import FinishReason, ReadPart, Request, RowOutput, RowTimes, TokenLogprobs

FAULT = "the engine failed on this request"
"""How the sentence begins that tells of a fault; other errors are the request's own."""
PATIENCE = 1000
"""Rows that may overtake an earlier one for being one level more urgent."""

FIRST = -1_000_001
"""The priority of rows that are to be alone: before all that can be asked for."""


class Row:
    """Grows by what the target emits; cuts itself at the first stop."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, max_len: int) -> None:
        self.request = request
        self.max_len = max_len
        self.output: list[int] = list(request.resumed)
        self.decoding = False
        """Whether its last token is on the device and alone unread."""
        self.number = 0
        """The row's place in the order rows came in."""
        self.turn = 0
        """The row's place in the order in which tenants take turns; with one tenant, the same."""
        self.num_cached: int | None = None
        """Tokens that were there when it was first admitted; None before."""
        self.came = time.perf_counter()
        self.admitted: float | None = None
        """When it was first admitted; None before."""
        self.asks_host = request.params.asks_host
        self.afresh = request.params.reads_prompt
        """Whether it must read all of its tokens itself, whatever is kept of others."""
        self.finish_reason: FinishReason | None = None
        params = request.params
        self._stream = TextStream(tokenizer, params.stop, params.skip_special_tokens)
        for count, token in enumerate(request.resumed, 1):  # their text was told by whoever emitted them
            self._stream.push(token, match=count >= params.min_tokens)
        self._reading = PromptReading(params.pooling) if params.reads_prompt else None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: lower priorities, and within one those whose turn is first; but nobody waits for more than
        `PATIENCE` later turns for each level between them."""
        return self._priority * PATIENCE + self.turn, self.number

    def outranks(self, other: "Row") -> bool:
        """Whether it may take the other's place while that runs."""
        return self._priority < other._priority and self.rank < other.rank

    @property
    def alone(self) -> bool:
        """Whether no other row may share its steps."""
        return len(self.output) - len(self.request.resumed) < self.request.alone

    @property
    def _priority(self) -> int:
        return FIRST if self.request.alone else self.request.params.priority

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Prompt and output as one sequence; stops at what is there."""
        prompt = self.request.prompt
        split = len(prompt)
        return (*prompt[start:end], *self.output[max(0, start - split) : max(0, end - split)])

    @property
    def num_left(self) -> int:
        """Tokens after which it ends at the latest."""
        return min(self.request.params.max_tokens - len(self.output), self.max_len - self.num_tokens)

    @property
    def depth_limit(self) -> int:
        """Drafts that could still be emitted, besides the token every step gives."""
        return max(0, min(self.request.draft_tokens, self.num_left - 1))

    def read(self, part: ReadPart) -> None:
        """Takes what a step found out about a part of the prompt."""
        assert self._reading is not None, "nobody asked"
        self._reading.take(part)

    def accept(
        self,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        num_accepted: int,
        rejected: tuple[int, ...],
        failure: str | None = None,
    ) -> RowOutput:
        """Takes a step's tokens up to the first that ends the row; the rest never happened. With a `failure` the
        row ends after the last of them at the latest."""
        params = self.request.params
        text, kept, stop_reason = "", 0, None
        for token in tokens:
            self.output.append(token)
            kept += 1
            if token in self.request.stop_ids:
                self.finish_reason, stop_reason = "stop", token
                text += self._stream.push(token, match=False).text if params.include_stop else ""
                break
            event = self._stream.push(token, match=len(self.output) >= params.min_tokens)
            text += event.text
            if event.stopped is not None:
                self.finish_reason, stop_reason = "stop", event.stopped
                text += event.stopped if params.include_stop else ""
                break
            if len(self.output) >= params.max_tokens or self.num_tokens >= self.max_len:
                self.finish_reason = "length"
                break
        if self.finish_reason is None and failure is not None:
            self.finish_reason, stop_reason = "error", failure
        if self.finish_reason is not None:
            text += self._stream.finish()
            if stop_reason is None and self._stream.stopped is not None:
                self.finish_reason, stop_reason = "stop", self._stream.stopped
                text += self._stream.stopped if params.include_stop else ""
        self.decoding = True
        is_first = len(self.output) == len(self.request.resumed) + kept
        reading = self._reading if is_first else None
        return RowOutput(
            request=self.request,
            token_ids=tokens[:kept],
            text=text,
            num_drafted=num_accepted + len(rejected),
            num_accepted=num_accepted,
            from_draft=tuple(i < num_accepted for i in range(kept)),
            logprobs=logprobs[:kept],
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            rejected=rejected,
            is_first=is_first,
            num_cached=(self.num_cached or 0) if is_first else 0,
            prompt_logprobs=None if reading is None or params.prompt_logprobs is None else reading.tokens,
            embedding=None if reading is None else reading.embedding(),
            times=self._times() if is_first else None,
        )

    def _times(self) -> RowTimes:
        """What came before its first tokens, which are there now."""
        admitted = self.came if self.admitted is None else self.admitted
        return RowTimes(admitted - self.came, time.perf_counter() - admitted)

    def fail(self, why: str) -> RowOutput:
        """Ends with an error; `why` is a sentence for the user."""
        self.finish_reason = "error"
        text = ""
        with contextlib.suppress(Exception):  # the stream may be what failed
            text = self._stream.finish()
        return RowOutput(self.request, (), text, 0, 0, (), (), "error", why)

    def cancel(self) -> RowOutput:
        self.finish_reason = "cancelled"
        return RowOutput(self.request, (), self._stream.finish(), 0, 0, (), (), "cancelled")
