"""What a user gets back: finished completions with their statistics, and the chunks of a stream."""

from dataclasses import dataclass, field, replace

from headlong.types import FinishReason, ReadToken, RowTimes, TokenLogprobs


@dataclass(frozen=True)
class MtpStatus:
    """Whether drafting ran for a completion and, if not, why."""

    ran: bool
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.ran


@dataclass(frozen=True)
class Stats:
    """How a completion came about. A step here is one pass of the target after the prompt was read."""

    steps: int
    tokens_per_step: float
    """Tokens per step; 1.0 without drafting."""
    drafted: int
    accepted: int
    tried_per_position: tuple[int, ...]
    """The number of drafts at each depth whose predecessors were all accepted."""
    accepted_per_position: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    """The number of the prompt's tokens that came from the prefix cache."""
    prompt_seconds: float
    decode_seconds: float
    mtp: MtpStatus
    queue_seconds: float = 0.0
    """The time it waited until it was first admitted."""
    prefill_seconds: float = 0.0
    """The time from there until its first tokens, on the clock: other rows' steps count."""

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """The acceptance rate at each depth, of the drafts whose predecessors were all accepted."""
        pairs = zip(self.accepted_per_position, self.tried_per_position, strict=True)
        return tuple(accepted / tried if tried else 0.0 for accepted, tried in pairs)

    @property
    def tokens_per_second(self) -> float:
        """The rate of decoding; the time that the prompt took does not count."""
        return self.steps * self.tokens_per_step / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt. `token_ids` includes the stop token that ended it, `text` does not."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    stats: Stats
    index: int = 0
    rest: tuple["Completion", ...] = field(default=(), repr=False)
    prompt_logprobs: tuple[ReadToken, ...] | None = None
    """The log-probabilities of the prompt's tokens but the first, where they were asked for."""
    embedding: tuple[float, ...] | None = field(default=None, repr=False)
    """What was made of the prompt's hidden states, where that was asked for."""

    @property
    def choices(self) -> tuple["Completion", ...]:
        """All n continuations, this one first."""
        return (self, *self.rest)

    @staticmethod
    def joined(choices: "list[Completion]") -> "Completion":
        """Joins the continuations of one prompt: returns the first, with the others as its `rest`."""
        return replace(choices[0], rest=tuple(choices[1:]))


@dataclass(frozen=True)
class Chunk:
    """What one step added to one continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    """Says of each token whether it was drafted and accepted."""
    num_drafted: int = 0
    num_accepted: int = 0
    rejected: tuple[int, ...] = ()
    """The drafts of this step that the target refused."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    request_id: str = ""
    completion: Completion | None = None
    """The whole completion, in the last chunk of its index; None in all others."""
    num_cached: int = 0
    """The number of prompt tokens that came from the prefix cache; it is told with the first tokens."""
    seconds: float = field(default=0.0, compare=False)
    """The engine's seconds since the continuation's last chunk, as its statistics count them."""
    times: RowTimes | None = field(default=None, compare=False)
    """What it took until the first tokens; it is told with them."""
