"""Continuations that outlive their engine: what was delivered of each, and what is left for another engine to compute.

A request's text depends on its prompt, its parameters and its seed alone, so another engine of the same model goes on
at the very token where the first one was lost. Knows no engine: it reads chunks.
"""

from dataclasses import replace

from headlong.completion import Chunk
from headlong.engine.collect import Collector, why_not_drafting
from headlong.types import FinishReason, Request, RowOutput, StepOutput


class Delivered:
    """One request's chunks so far, whichever engines they came from. `refusal` is why those engines cannot draft; None
    if they can."""

    def __init__(self, request: Request, refusal: str | None) -> None:
        self.request = request
        self._collector = Collector(request, why_not_drafting(refusal, request))
        self._token_ids: list[int] = []
        self._was_resumed = False

    @property
    def begun(self) -> bool:
        """Whether tokens of it were delivered."""
        return bool(self._token_ids)

    @property
    def ended(self) -> bool:
        return self._collector.completion is not None

    def take(self, chunk: Chunk) -> Chunk:
        """Takes the next chunk; returns it as it is to be passed on. The last one has the whole completion, those of
        engines that were lost included."""
        ended = chunk.completion
        output = RowOutput(
            request=self.request,
            token_ids=chunk.token_ids,
            text=chunk.text,
            num_drafted=chunk.num_drafted,
            num_accepted=chunk.num_accepted,
            from_draft=chunk.from_draft,
            logprobs=chunk.logprobs,
            finish_reason=chunk.finish_reason,
            stop_reason=None if ended is None else ended.stop_reason,
            rejected=chunk.rejected,
            is_first=ended is not None,  # what was found out about the prompt comes with the completion
            num_cached=0 if self.begun else chunk.num_cached,
            prompt_logprobs=None if ended is None else ended.prompt_logprobs,
            embedding=None if ended is None else ended.embedding,
            times=None if self.begun else chunk.times,
        )
        taken = self._collector.take(StepOutput(seconds=chunk.seconds), output)
        self._token_ids.extend(chunk.token_ids)
        if not self._was_resumed:
            return chunk
        return replace(chunk, num_cached=output.num_cached, times=output.times, completion=taken.completion)

    def end(self, finish_reason: FinishReason, why: str | None = None) -> Chunk:
        """Ends it here, without an engine. Text that was held back stays untold."""
        output = RowOutput(self.request, (), "", 0, 0, (), (), finish_reason, why)
        return self._collector.take(StepOutput(), output)

    def rest(self) -> Request:
        """What another engine has to compute: all of it where nothing was delivered."""
        self._was_resumed = self._was_resumed or self.begun
        return replace(self.request, resumed=tuple(self._token_ids))
