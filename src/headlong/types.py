"""The values that pass between the stages of a step, each frozen. Knows no stage.

Shape letters: R rows, N tokens of all rows, L tokens whose logits are wanted, K drafts, V vocabulary,
P pages of the longest row. `p` is always the target's distribution, `q` the draft's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from headlong.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Constraint(Protocol):
    """What one row's output must obey, followed token by token. Belongs to one thread."""

    @property
    def failure(self) -> str | None:
        """Why the output cannot be followed further; the row ends there."""
        ...

    @property
    def slow(self) -> bool:
        """Whether masks take so long that others should not wait for them."""
        ...

    @property
    def grace(self) -> float:
        """The seconds for which others may wait for what is under way."""
        ...

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether the mask after what was emitted is there, or is made in a moment. Else it is made meanwhile; nothing
        else may be asked until it is there. Waits for it for so long."""
        ...

    def foresee(self, drafts: Sequence[int]) -> int:
        """Makes the masks after these drafts, as far as that takes no longer than others may wait. Returns how many of
        the drafts have one, and all before them; only so many may be verified."""
        ...

    def advance(self, tokens: Sequence[int]) -> int:
        """Follows tokens that were emitted. Returns how many of them the constraint allows: all, unless `failure` is
        set."""
        ...

    def masks(
        self, drafts: Sequence[int], first: int, count: int, *, patient: bool = True
    ) -> list[bytes | None]:
        """Returns which tokens may stand after what was emitted and the first `first` of the drafts, then after the
        first `first + 1`, and so on: one bit per token, the lowest bit first, or None where every token may. After a
        draft that is not allowed it is None, since that draft will not be accepted; and so it is for what would
        take longer than others may wait, unless one is `patient`. Changes nothing that can be seen."""
        ...


@dataclass(frozen=True)
class Request:
    """One sequence to continue. `choice` tells the n sequences of one prompt apart."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    choice: int = 0
    draft_tokens: int = 0
    """The most drafts that a step may have; 0 for a row that never drafts."""
    adaptive: bool = False
    """Whether the engine may choose fewer, step by step; else every step drafts as many as it can."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence: end-of-sequence ids (unless ignored) and `stop_token_ids`."""
    prefix_extras: tuple[tuple[int, bytes], ...] = ()
    """Pairs (position, bytes), by position: what the sequence's state depends on from that position on besides its
    tokens, such as an adapter or an image. Only sequences with equal extras share cached prefixes."""
    tenant: str = ""
    """Who asks: rows of the same priority are let in by turns, tenant by tenant."""
    resumed: tuple[int, ...] = ()
    """Tokens of the output that another engine emitted before it was lost. The row goes on after them as one that was
    preempted there: it reads them, counts them as its own, and emits what follows."""
    again: bool = False
    """Whether another engine had it and was lost. It has waited for its turn already."""
    alone: int = 0
    """How many tokens the row emits in steps that no other row shares, before it goes on in company: it may be what
    ended the engines that had it. It waits for nobody."""
    constraint: Callable[[], Constraint] | None = field(default=None, compare=False, repr=False)
    """Starts the output's constraint afresh, each time the row is admitted. The function stays in the process that made
    it."""

    def __getstate__(self) -> Mapping[str, object]:
        """What travels to another process: what the request asks for, without the functions that follow it here."""
        return self.__dict__ | {"constraint": None}


@dataclass(frozen=True)
class RowPlan:
    """One row's part of a step: feed `query_len` tokens from position `start`; the last `num_drafts` may be
    rolled back. Rows that do not `sample` only read their prompt."""

    request: Request
    slot: int
    start: int
    query_len: int
    num_drafts: int
    num_replay: int
    pages: tuple[int, ...]
    samples: bool
    num_generated: int
    known_tokens: tuple[int, ...]
    """The tokens from `start` that the host knows: a prompt chunk and, where there is one, the token after
    it; empty for a decoding row, whose last token is on the device."""

    @property
    def num_certain(self) -> int:
        return self.query_len - self.num_drafts

    @property
    def num_logits(self) -> int:
        return 1 + self.num_drafts if self.samples else 0


class DraftStop(Protocol):
    """Decides after every draft whether a row goes on drafting, for drafters that know how sure they are of it."""

    def judge(self, row_ids: Sequence[str], confidences: Sequence[float]) -> tuple[list[bool], list[bool]]:
        """Returns which of these rows' newest drafts are kept, and which rows may have another one. A row whose draft
        is not kept has no further ones."""
        ...


@dataclass(frozen=True)
class Plan:
    """Who runs in this step. Rows are ordered by `num_certain`, longest first. A plan is a value: other processes that
    hold parts of the same model can be sent it, and find it equal to the one that was made."""

    rows: tuple[RowPlan, ...]
    num_drafts: int
    """The deepest draft among the rows."""
    draft_stop: DraftStop | None = field(default=None, compare=False, repr=False)
    """What decides whether a row goes on drafting; None where every row is to have all its drafts. The object stays in
    the process that made the plan: what it decided is the draft's own counts."""

    def __getstate__(self) -> Mapping[str, object]:
        """What travels to another process: the plan without its `draft_stop`."""
        return self.__dict__ | {"draft_stop": None}

    @property
    def num_tokens(self) -> int:
        return sum(row.query_len for row in self.rows)

    @property
    def first_logits(self) -> list[int]:
        """The index of each row's first logits, among the logits of all rows."""
        firsts, total = [], 0
        for row in self.rows:
            firsts.append(total)
            total += row.num_logits
        return firsts

    @property
    def drafting(self) -> tuple[RowPlan, ...]:
        return tuple(row for row in self.rows if row.num_drafts)

    def fitted(self, draft: "Draft | None") -> "Plan":
        """The same step with the drafts that were really made: a proposer may have fewer than it was asked for."""
        counts = (0,) * len(self.rows) if draft is None else draft.counts
        if counts is None or all(
            row.num_drafts == count for row, count in zip(self.rows, counts, strict=True)
        ):
            return self
        rows = tuple(
            replace(row, num_drafts=count, query_len=row.num_certain + count)
            for row, count in zip(self.rows, counts, strict=True)
        )
        return Plan(rows, max(counts, default=0), self.draft_stop)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, one row of `tokens_RK` per row of the plan; what lies beyond a row's own depth is
    padding. `q_RKV` is kept only where a verification needs it."""

    tokens_RK: Tensor
    q_RKV: Tensor | None = None
    counts: tuple[int, ...] | None = None
    """Drafts of each row where they are fewer than planned; None if all were made. The width is the largest."""


class Rows(NamedTuple):
    """The rows that a step feeds, as the ops read them."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_drafts: tuple[int, ...]
    num_replay: tuple[int, ...]

    @classmethod
    def of_tokens(cls, starts: tuple[int, ...]) -> "Rows":
        """Makes rows of one certain token each, for passes that touch no slot."""
        nothing = (0,) * len(starts)
        return cls(nothing, starts, (1,) * len(starts), nothing, nothing)

    @property
    def table(self) -> Tensor:
        """The rows as a tensor [rows, 5] on the CPU; native kernels rely on the order of its columns."""
        return torch.tensor(list(zip(*self, strict=True)))


@dataclass(frozen=True)
class Batch:
    """A step's tokens, flattened row after row, ready for the model."""

    tokens_N: Tensor
    next_tokens_N: Tensor
    """The token after each one, where it is known before sampling; the head pairs hidden states with it."""
    positions_N: Tensor
    """The position of each token in its row. Text is rotated by this alone; `ops.rope` takes [A, N] where a token has
    several positions."""
    pages_RP: Tensor
    logits_index_L: Tensor
    rows: Rows


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's own distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, log-probability), the best first."""


class ReadToken(NamedTuple):
    """A token of a prompt as the model saw it come."""

    logprobs: TokenLogprobs
    rank: int
    """The token's place among all tokens by their log-probabilities, from 1 on."""


class ReadPart(NamedTuple):
    """What a step found out about the part of a prompt that it read."""

    start: int
    """The position of the part's first token."""
    tokens: tuple[ReadToken, ...]
    """The tokens after each of the part's, as far as the prompt goes."""
    hidden_ND: Tensor | None
    """The hidden states of its tokens, where they are asked for."""


@dataclass(frozen=True)
class Verdict:
    """What the target decided about one step."""

    tokens_L: Tensor | None
    """The token that is valid after each row of logits: the accepted drafts, then the target's own token. Entries after
    those are meaningless. None for a step that has stored its tokens itself."""
    accepted: tuple[int, ...]
    """The number of accepted drafts of each row of the plan; 0 for rows that do not sample."""
    tokens: tuple[tuple[int, ...], ...]
    """The tokens that each row emits: accepted drafts and one more token, or nothing."""
    rejected: tuple[tuple[int, ...], ...]
    """The drafts of each row that were not accepted."""
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]
    poisoned: tuple[int, ...] = ()
    """Rows of the plan whose logits are not finite; what the verdict says of them means nothing."""
    read: Mapping[str, ReadPart] = field(default_factory=dict)
    """What was found out about prompts, by the id of the request, for those that ask for it."""


@dataclass(frozen=True)
class RowTimes:
    """Seconds on the clock until a row had its first tokens."""

    queue: float
    """Seconds from the row's coming until it was first admitted."""
    prefill: float
    """Seconds from there until its first tokens."""


@dataclass(frozen=True)
class RowOutput:
    """What one row gained in a step."""

    request: Request
    token_ids: tuple[int, ...]
    text: str
    num_drafted: int
    num_accepted: int
    """The number of drafts that the target agreed with, whether or not a stop cut them off again."""
    from_draft: tuple[bool, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or string that ended the row; for `error`, the sentence that says why."""
    rejected: tuple[int, ...] = ()
    """The drafts the target refused, the first refused first."""
    is_first: bool = False
    """Whether the step ended the prompt; every later one is a decoding step."""
    num_cached: int = 0
    """The number of prompt tokens that came from the prefix cache; it is reported with the first tokens."""
    prompt_logprobs: tuple[ReadToken, ...] | None = None
    """The log-probabilities of the prompt's tokens but the first, where they are asked for; they come with the first
    tokens of the output."""
    embedding: tuple[float, ...] | None = None
    """What was made of the prompt's hidden states; it comes with the first tokens."""
    times: RowTimes | None = field(default=None, compare=False)
    """What it took until the first tokens; it is reported with them."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds a step took, on the engine's own clock."""

    draft: float
    """Seconds of proposing, and of what the proposer does after the verdict."""
    verify: float
    """Seconds of the target's pass, the verdict and the bookkeeping: all that a plain step has."""


@dataclass(frozen=True)
class StepOutput:
    """All that happened in one step; metrics and streams read nothing else."""

    rows: tuple[RowOutput, ...] = ()
    num_prompt_tokens: int = 0
    num_rows: int = 0
    num_waiting: int = 0
    seconds: float = 0.0
    preempted: tuple[str, ...] = field(default=())
