"""Gathers a sequence's step outputs into a completion with statistics. Reads `StepOutput`s alone."""

from headlong.completion import Chunk, Completion, MtpStatus, Stats
from headlong.types import Request, RowOutput, RowTimes, StepOutput, TokenLogprobs


class Collector:
    """One per request; sees every step from the one it was added in."""

    def __init__(self, request: Request, why_no_drafts: str | None) -> None:
        self.request = request
        self.completion: Completion | None = None
        self._why_no_drafts = why_no_drafts
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._steps = 0
        self._drafted = 0
        self._accepted = 0
        self._tried: list[int] = []
        self._agreed: list[int] = []
        self._cached = 0
        self._read: RowOutput | None = None
        """The output that tells about the prompt."""
        self._prompt_seconds = 0.0
        self._decode_seconds = 0.0
        self._times = RowTimes(0.0, 0.0)
        self._untold_seconds = 0.0
        """The engine's seconds since the last chunk."""

    @property
    def begun(self) -> bool:
        """Whether it has tokens, or will have none: its prompt needs no more reading."""
        return bool(self._tokens) or self.completion is not None

    def wait(self, step: StepOutput) -> None:
        """A step that gave this row nothing."""
        self._spend(step.seconds)

    def take(self, step: StepOutput, output: RowOutput) -> Chunk:
        """A step that gave it tokens, or its end."""
        if self._tokens and output.token_ids:
            self._steps += 1
            self._count_drafts(output)
        if output.token_ids:
            self._spend(step.seconds)
        self._cached = max(self._cached, output.num_cached)
        if output.is_first:
            self._read = output
        self._times = output.times or self._times
        self._text.append(output.text)
        self._tokens.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        if output.finish_reason is not None:
            self.completion = self._complete(output)
        seconds, self._untold_seconds = self._untold_seconds, 0.0
        return Chunk(
            index=self.request.choice,
            text=output.text,
            token_ids=output.token_ids,
            from_draft=output.from_draft,
            num_drafted=output.num_drafted,
            num_accepted=output.num_accepted,
            rejected=output.rejected,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            request_id=self.request.id,
            completion=self.completion,
            num_cached=output.num_cached,
            seconds=seconds,
            times=output.times,
        )

    def _spend(self, seconds: float) -> None:
        self._untold_seconds += seconds
        if self._tokens:
            self._decode_seconds += seconds
        else:
            self._prompt_seconds += seconds

    def _count_drafts(self, output: RowOutput) -> None:
        self._drafted += output.num_drafted
        self._accepted += output.num_accepted
        missing = output.num_drafted - len(self._tried)
        self._tried.extend([0] * missing)
        self._agreed.extend([0] * missing)
        for place in range(min(output.num_accepted + 1, output.num_drafted)):
            self._tried[place] += 1
            self._agreed[place] += place < output.num_accepted

    def _complete(self, output: RowOutput) -> Completion:
        assert output.finish_reason is not None
        stats = Stats(
            steps=self._steps,
            tokens_per_step=(len(self._tokens) - 1) / self._steps if self._steps else 0.0,
            drafted=self._drafted,
            accepted=self._accepted,
            tried_per_position=tuple(self._tried),
            accepted_per_position=tuple(self._agreed),
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self._cached,
            prompt_seconds=self._prompt_seconds,
            decode_seconds=self._decode_seconds,
            mtp=self._mtp(),
            queue_seconds=self._times.queue,
            prefill_seconds=self._times.prefill,
        )
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self._tokens),
            logprobs=None if self.request.params.logprobs is None else tuple(self._logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            stats=stats,
            index=self.request.choice,
            prompt_logprobs=None if self._read is None else self._read.prompt_logprobs,
            embedding=None if self._read is None else self._read.embedding,
        )

    def _mtp(self) -> MtpStatus:
        if self._drafted:
            return MtpStatus(True)
        if self._why_no_drafts is not None:
            return MtpStatus(False, self._why_no_drafts)
        if self._steps <= 1:
            return MtpStatus(False, "the output ended before a draft could be of use")
        if self.request.adaptive:
            return MtpStatus(False, "plain decoding was quicker, so nothing was drafted")
        return MtpStatus(False, "the drafter proposed nothing")


def why_not_drafting(refusal: str | None, request: Request) -> str | None:
    """Why a request will not draft, whatever pays; `refusal` is the engine's own reason if it cannot. None if the
    request may."""
    if refusal is not None or request.draft_tokens:
        return refusal
    off = "draft_tokens is 0 for this request"
    return off if request.params.draft_tokens == 0 else "the engine runs with draft_tokens 0"
