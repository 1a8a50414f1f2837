"""The stages of a step of decoding rows as a device computes them, none of which asks the host for anything.

Every row feeds as many tokens as the one that drafts most; what a row has beyond its own depth is padding, computed and
never accepted.

R rows of K drafts, N tokens in all.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.engine.step.layout import EvenLayout, Pass
from headlong.layers.context import Context
from headlong.models.decoder import DecoderModel
from headlong.ops.rope.reference import LARGEST_TABLE, Angles, angles
from headlong.ops.triton_step import NUM_TIMESTAMPS, TritonStep, round_up_positions
from headlong.sampling.processors import SamplingSignature
from headlong.sampling.sampler import Sampler
from headlong.speculate.draft_loop import Choice, make_drafts
from headlong.speculate.live_rows import EvenRows
from headlong.speculate.proposer import DeviceDrafter
from headlong.state.row_table import RowTable
from headlong.state.state import State

MAX_TOKENS = 512
"""The most tokens of one step."""


class Shape(NamedTuple):
    """What a captured step depends on besides its rows and drafts."""

    longest: int
    """Positions that are reckoned with."""
    reads: bool
    """Whether the head reads the step."""
    signature: SamplingSignature
    """How tokens are chosen."""
    tells: bool = False
    """Whether logits are asked for afterwards."""


class EvenStep(NamedTuple):
    """A step's plan as the device is told it."""

    layout: EvenLayout
    shape: Shape
    given_R4: Tensor
    """The slot, start, drafts to replay and drafts of each row."""
    first_RB: Tensor | None = None
    """Which tokens may come first among the drafts, a bit for each, where a grammar says so."""
    bits_NB: Tensor | None = None
    """Which tokens may stand at each place, where a grammar says so."""


class Drafted(NamedTuple):
    """A step whose drafts are made."""

    slots_R: Tensor
    pages_RP: Tensor
    drafts_RK: Tensor
    tokens_N: Tensor
    """What the target is fed."""
    found_X: Tensor
    """What will be read back, as `Found` of speculate/verdict.py has it, and the moments, some of which are in it
    already."""
    context: Context
    """The context of the target's pass."""


class Computed(NamedTuple):
    """The target's pass."""

    hidden_ND: Tensor
    logits_NV: Tensor


class Chosen(NamedTuple):
    """The verdict, as far as the device needs it."""

    tokens_N: Tensor
    last_R: Tensor
    """The last token that stands of each row, among all."""


class DeviceStages:
    """One model, with the head's drafts or none, over one state."""

    def __init__(
        self, model: DecoderModel, state: State, sampler: Sampler, drafter: DeviceDrafter | None, max_len: int
    ) -> None:
        self.model, self.state, self.sampler, self.drafter = model, state, sampler, drafter
        self.device, self._ops = model.ops.device, model.ops.step
        longest = round_up_positions(max_len + state.max_drafts)
        self.row_table = RowTable(state.slots.size, -(-longest // state.page_size), self.device)
        self._kept_TV: Tensor | None = None
        # A table that grew would leave captured steps behind with the old one.
        nowhere = torch.zeros(1, dtype=torch.long, device=self.device)
        angles(nowhere, model.rotary, model.ops.activation_dtype, min(longest, LARGEST_TABLE) - 1)

    def draft(self, plan: EvenStep) -> Drafted:
        """Finds out where the rows are, and drafts from the carry on. Rows that are sampled share the target's noise at
        each position, and those that are penalised or biased are so here."""
        layout, shape, table = plan.layout, plan.shape, self.row_table
        num_rows, num_drafts = layout.num_rows, layout.num_drafts
        found_X = torch.empty(
            num_rows * 3 * (1 + num_drafts) + NUM_TIMESTAMPS, dtype=torch.long, device=self.device
        )
        times = found_X[-NUM_TIMESTAMPS:]
        slots_R, pages_RP = self._ops.begin(
            plan.given_R4, table.place_S2, table.pages_SP, layout.table_PR6, layout.position_X,
            -(-shape.longest // self.state.page_size), num_drafts, times,
        )  # fmt: skip
        context, *ahead = self._contexts(layout, shape, pages_RP)
        drafts_RK = slots_R.new_empty(num_rows, 0)
        if num_drafts:
            drafts_RK = self._drafts(plan, slots_R, ahead)
        tokens_N = self._ops.feed(slots_R, self.state.last_token_S, drafts_RK, times)
        return Drafted(slots_R, pages_RP, drafts_RK, tokens_N, found_X, context)

    def forward(self, plan: EvenStep, draft: Drafted) -> Computed:
        hidden_ND = self.model.forward(draft.tokens_N, draft.context, self.state.layers)
        logits_NV = self.model.logits(hidden_ND)
        if plan.shape.tells:
            self.keep(logits_NV)
        return Computed(hidden_ND, logits_NV)

    def choose(self, plan: EvenStep, draft: Drafted, logits_NV: Tensor) -> Tensor:
        """The target's tokens."""
        after_N, shape = _after(plan.layout, plan.shape), plan.shape
        return self.sampler.choose_even(
            logits_NV, draft.slots_R, after_N, draft.drafts_RK, shape.signature, plan.bits_NB
        )

    def verify(self, plan: EvenStep, draft: Drafted, computed: Computed) -> Chosen:
        """Leaves the verdict to be read back, and each row's last token and place where the next step finds them."""
        tokens_N = self.choose(plan, draft, computed.logits_NV)
        last_R = self._ops.accept(
            plan.given_R4, plan.layout.position_X, draft.slots_R, tokens_N, draft.drafts_RK, computed.logits_NV,
            self.row_table.stops_SM, self.state.last_token_S, self.row_table.place_S2,
            draft.found_X, draft.found_X[-NUM_TIMESTAMPS:],
        )  # fmt: skip
        return Chosen(tokens_N, last_R)

    def commit(self, plan: EvenStep, draft: Drafted, computed: Computed, verdict: Chosen) -> None:
        """The device's half of it: counts what penalised rows have seen, and has the head read the step where it is to.
        Lengths are the host's, which commits them when the step lands."""
        slots_R = draft.slots_R
        if plan.shape.signature.penalised:
            self._ops.count_tokens(
                verdict.last_R, slots_R, verdict.tokens_N, self.sampler.table.tally.counts_SV
            )
        if plan.shape.reads:
            # Past the accepted drafts this pairs with tokens that will not stand; those places are rewritten before
            # anything reads them.
            assert self.drafter is not None
            alone = Context(draft.context.angles, draft.context.attention)
            out_ND = self.drafter.forward(verdict.tokens_N, computed.hidden_ND, alone)
            times = draft.found_X[-NUM_TIMESTAMPS:]
            self._ops.carry(out_ND, verdict.last_R, slots_R, self.state.carry_SD, times)

    def context(self, plan: EvenStep, pages_RP: Tensor) -> Context:
        """The context of the target's pass once more, where that is a launch of its own; rows are where `draft` found
        them."""
        return self._contexts(plan.layout, plan.shape, pages_RP)[0]

    def keep(self, logits_NV: Tensor) -> None:
        """Keeps logits for `kept`, until the next step that keeps its own."""
        if self._kept_TV is None:
            most = min(MAX_TOKENS, self.state.slots.size * (1 + self.state.max_drafts))
            self._kept_TV = logits_NV.new_empty(most, logits_NV.shape[1])
        self.kept(len(logits_NV)).copy_(logits_NV)

    def kept(self, num_tokens: int) -> Tensor:
        """Logits of a step of so many tokens. All have one place: captured steps would else hold one each."""
        assert self._kept_TV is not None, "nothing was kept"
        return self._kept_TV[:num_tokens]

    def _contexts(self, layout: EvenLayout, shape: Shape, pages_RP: Tensor) -> list[Context]:
        """The contexts of the target's pass, then of the head's; rows are where `begin` found them."""
        rotation = self._rotation(layout.position_X, shape.longest)
        return [self._context(part, rotation, pages_RP, shape.longest) for part in layout.passes()]

    def _drafts(self, plan: EvenStep, slots_R: Tensor, ahead: Sequence[Context]) -> Tensor:
        rows = EvenRows(plan.layout.num_rows, plan.layout.num_drafts)
        made = make_drafts(_Passes(self, slots_R, ahead), _Choice(self, plan, slots_R), rows)
        return torch.stack([each.tokens_L for each in made], dim=1)

    def _rotation(self, position_X: Tensor, longest: int) -> Angles:
        rotary, dtype = self.model.rotary, self.model.ops.activation_dtype
        if longest > LARGEST_TABLE:
            return angles(position_X, rotary, dtype, longest - 1)
        table = rotary.tables[dtype]
        cos, sin = self._ops.look_up(position_X, table.cos, table.sin)
        return replace(table, cos=cos, sin=sin)

    def _context(self, part: Pass, rotation: Angles, pages_RP: Tensor, longest: int) -> Context:
        each = len(part.row_N) // len(pages_RP)
        step = TritonStep(
            part.table_R6, part.row_N, part.position_N, pages_RP, self.state.page_size, each, longest
        )
        return Context(rotation.picked(part.tokens), step, step)


class _Passes:
    """The head's passes: what it says of the carry, then a token of each row, a position further each time."""

    def __init__(self, stages: DeviceStages, slots_R: Tensor, ahead: Sequence[Context]) -> None:
        assert stages.drafter is not None
        self._drafter, self._ahead = stages.drafter, ahead
        self._hidden_RD = stages.state.carry_SD[slots_R]

    def first(self) -> Tensor:
        return self._drafter.finish(self._hidden_RD)

    def after(self, drafts: Sequence[Tensor], live: list[int], stay: list[int] | None) -> Tensor:  # noqa: ARG002
        """What the lm_head takes."""
        depth = len(drafts)
        self._hidden_RD = self._drafter.forward(drafts[-1], self._hidden_RD, self._ahead[depth - 1], depth)
        return self._drafter.finish(self._hidden_RD, depth)


class _Choice:
    """A draft of each row, by the head's hidden states."""

    def __init__(self, stages: DeviceStages, plan: EvenStep, slots_R: Tensor) -> None:
        assert stages.drafter is not None
        self._sampler, self._vocabulary = stages.sampler, stages.drafter.vocabulary
        self._signature, self._first_RB, self._slots_R = plan.shape.signature, plan.first_RB, slots_R
        self._after_N = _after(plan.layout, plan.shape)

    def __call__(self, hidden_RD: Tensor, live: list[int], before: Sequence[Tensor]) -> Choice:  # noqa: ARG002
        signature, vocabulary, slots_R = self._signature, self._vocabulary, self._slots_R
        bits_RB = None if before else self._first_RB
        if signature.filters is None and not signature.changes and bits_RB is None:
            return Choice(vocabulary.argmax(hidden_RD))
        drafts_RK = slots_R.new_empty(len(slots_R), 0)
        if before and signature.changes:
            drafts_RK = torch.stack(list(before), dim=1)
        whole_RV = vocabulary.whole(vocabulary.logits(hidden_RD))
        after_N = self._after_N
        after_R = None if after_N is None else after_N.view(len(slots_R), -1)[:, len(before)]
        return Choice(self._sampler.choose_even(whole_RV, slots_R, after_R, drafts_RK, signature, bits_RB))


def _after(layout: EvenLayout, shape: Shape) -> Tensor | None:
    """The positions that tokens are chosen for, where anybody asks."""
    signature = shape.signature
    return (
        None
        if signature.filters is None and not signature.early
        else layout.passes()[0].position_N.long() + 1
    )
