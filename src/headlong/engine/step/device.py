"""What a device does in a step of decoding rows, in three parts: drafts, the target's pass, and the verdict with its
commit and the head's next carry. None of them asks the host for anything.

Every row feeds as many tokens as the one that drafts most; what a row has beyond its own depth is padding, computed and
never accepted.

R rows of K drafts, N tokens in all.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.engine.step.layout import EvenLayout, Pass
from headlong.layers.context import Context
from headlong.models.decoder import DecoderModel
from headlong.ops.rope.reference import LARGEST_TABLE, Angles, angles
from headlong.ops.triton_step import MARKS, TritonStep, round_up_positions
from headlong.sampling.processors import Alike
from headlong.sampling.sampler import Sampler
from headlong.speculate.mtp import MtpProposer
from headlong.state.row_table import RowTable
from headlong.state.state import State

MAX_TOKENS = 256
"""Of a step."""


class Shape(NamedTuple):
    """What a recorded step depends on besides its rows and drafts."""

    longest: int
    """Positions that are reckoned with."""
    reads: bool
    """Whether the head reads the step."""
    asked: Alike
    """How tokens are chosen."""
    tells: bool = False
    """Whether logits are asked for afterwards."""


class Begun(NamedTuple):
    """A step whose drafts are made."""

    slots_R: Tensor
    pages_RP: Tensor
    drafts_RK: Tensor
    tokens_N: Tensor
    """What the target is fed."""
    found_X: Tensor
    """What will come back; moments are in it already."""


class DeviceStep:
    """One model, with the head's drafts or none, over one state."""

    def __init__(
        self, model: DecoderModel, state: State, sampler: Sampler, drafter: MtpProposer | None, max_len: int
    ) -> None:
        self.model, self.state, self.sampler, self.drafter = model, state, sampler, drafter
        self._device = model.ops.device
        from headlong.ops.penalise.triton import count
        from headlong.ops.step import triton as triton_step  # Triton is not everywhere

        self._turn, self._count = triton_step, count
        longest = round_up_positions(max_len + state.max_drafts)
        self.row_table = RowTable(state.slots.size, -(-longest // state.page_size), self._device)
        self.chosen: Callable[[Tensor, Tensor], Tensor] = lambda chosen_N, _drafts_RK: chosen_N
        """The target's tokens; benchmarks change them, to have drafts stand as they wish."""
        self._kept_TV: Tensor | None = None
        # A table that grew would leave recorded steps behind with the old one.
        nowhere = torch.zeros(1, dtype=torch.long, device=self._device)
        angles(nowhere, model.rotary, model.ops.activation_dtype, min(longest, LARGEST_TABLE) - 1)

    def all(self, layout: EvenLayout, shape: Shape, given_R4: Tensor) -> tuple[Tensor, Tensor]:
        """The whole step: what comes back, and hidden states."""
        begun, contexts = self.begin(layout, shape, given_R4)
        hidden_ND, logits_NV = self.verify(begun.tokens_N, contexts[0])
        if shape.tells:
            self.keep(logits_NV)
        return self.settle(layout, shape, given_R4, begun, contexts[0], hidden_ND, logits_NV), hidden_ND

    def begin(
        self, layout: EvenLayout, shape: Shape, given_R4: Tensor, first_RB: Tensor | None = None
    ) -> tuple[Begun, list[Context]]:
        """The drafts, and the contexts of the target's pass and the head's. The bits `first_RB` say which tokens may
        come first."""
        state, table, turn, drafts = self.state, self.row_table, self._turn, layout.num_drafts
        size = layout.num_rows * (3 * (1 + drafts)) + MARKS
        found_X = torch.empty(size, dtype=torch.long, device=self._device)
        times = found_X[-MARKS:]
        slots_R, pages_RP = turn.begin(
            given_R4, table.place_S2, table.pages_SP, layout.table_PR6, layout.position_X,
            -(-shape.longest // state.page_size), drafts, times,
        )  # fmt: skip
        contexts = self.contexts(layout, shape, pages_RP)
        drafts_RK = slots_R.new_empty(layout.num_rows, 0)
        if drafts:
            drafts_RK = self._draft(slots_R, contexts[1:], _after(layout, shape), shape.asked, first_RB)
        tokens_N = turn.feed(slots_R, state.last_token_S, drafts_RK, times)
        return Begun(slots_R, pages_RP, drafts_RK, tokens_N, found_X), contexts

    def verify(self, tokens_N: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Hidden states and logits."""
        hidden_ND = self.model.forward(tokens_N, context, self.state.layers)
        return hidden_ND, self.model.logits(hidden_ND)

    def keep(self, logits_NV: Tensor) -> None:
        """For `kept`, until the next step that keeps its own."""
        if self._kept_TV is None:
            most = min(MAX_TOKENS, self.state.slots.size * (1 + self.state.max_drafts))
            self._kept_TV = logits_NV.new_empty(most, logits_NV.shape[1])
        self.kept(len(logits_NV)).copy_(logits_NV)

    def kept(self, num_tokens: int) -> Tensor:
        """Logits of a step of so many tokens. All have one place: recordings would else hold one each."""
        assert self._kept_TV is not None, "nothing was kept"
        return self._kept_TV[:num_tokens]

    def settle(
        self,
        layout: EvenLayout,
        shape: Shape,
        given_R4: Tensor,
        begun: Begun,
        context: Context,
        hidden_ND: Tensor,
        logits_NV: Tensor,
        bits_NB: Tensor | None = None,
    ) -> Tensor:
        """What comes back: tokens, whether they are numbers, how many drafts stand, drafts, moments. `bits_NB` say
        which tokens are allowed at each place."""
        turn, table, state, asked = self._turn, self.row_table, self.state, shape.asked
        slots_R, drafts_RK, found_X = begun.slots_R, begun.drafts_RK, begun.found_X
        times = found_X[-MARKS:]
        chosen_N = self.sampler.choose_alike(
            logits_NV, slots_R, _after(layout, shape), drafts_RK, asked, bits_NB
        )
        chosen_N = self.chosen(chosen_N, drafts_RK)
        settled_R = turn.settle(
            given_R4, layout.position_X, slots_R, chosen_N, drafts_RK, logits_NV,
            table.stops_SM, state.last_token_S, table.place_S2, found_X, times,
        )  # fmt: skip
        if asked.penalised:
            self._count(settled_R, slots_R, chosen_N, self.sampler.table.tally.counts_SV)
        if shape.reads:
            # Past the accepted drafts this pairs with tokens that will not stand; those places are rewritten before
            # anything reads them.
            assert self.drafter is not None
            alone = Context(context.angles, context.attention)
            out_ND = self.drafter.head.forward(self.model.embed(chosen_N), hidden_ND, alone, state.layers)
            turn.carry(out_ND, settled_R, slots_R, state.carry_SD, times)
        return found_X

    def contexts(self, layout: EvenLayout, shape: Shape, pages_RP: Tensor) -> list[Context]:
        """Of the target's pass, then of the head's; rows are where `begin` found them."""
        rotation = self._rotation(layout.position_X, shape.longest)
        return [self._context(part, rotation, pages_RP, shape.longest) for part in layout.passes()]

    def _draft(
        self,
        slots_R: Tensor,
        ahead: list[Context],
        after_N: Tensor | None,
        asked: Alike,
        first_RB: Tensor | None,
    ) -> Tensor:
        """[R, K] from the carry on; rows that are sampled share the target's noise at each position, and those that are
        penalised or biased are so here."""
        assert self.drafter is not None
        head, vocabulary = self.drafter.head, self.drafter.vocabulary
        hidden_RD, drafts = self.state.carry_SD[slots_R], []
        before_RK = slots_R.new_empty(len(slots_R), 0)
        for place in range(1 + len(ahead)):
            bits_RB = None if place else first_RB
            if place:
                embedding_RD = self.model.embed(drafts[-1])
                context, layers = ahead[place - 1], self.state.layers
                hidden_RD = head.forward(embedding_RD, hidden_RD, context, layers, place)
            if asked.kind is None and not asked.changes and bits_RB is None:
                drafts.append(vocabulary.argmax(hidden_RD))
                continue
            if place and asked.changes:
                before_RK = torch.stack(drafts, dim=1)
            whole_RV = vocabulary.whole(vocabulary.logits(hidden_RD))
            after_R = None if after_N is None else after_N.view(len(slots_R), -1)[:, place]
            drafts.append(self.sampler.choose_alike(whole_RV, slots_R, after_R, before_RK, asked, bits_RB))
        return torch.stack(drafts, dim=1)

    def _rotation(self, position_X: Tensor, longest: int) -> Angles:
        rotary, dtype = self.model.rotary, self.model.ops.activation_dtype
        if longest > LARGEST_TABLE:
            return angles(position_X, rotary, dtype, longest - 1)
        table = rotary.tables[dtype]
        cos, sin = self._turn.look_up(position_X, table.cos, table.sin)
        return replace(table, cos=cos, sin=sin)

    def _context(self, part: Pass, rotation: Angles, pages_RP: Tensor, longest: int) -> Context:
        each = len(part.row_N) // len(pages_RP)
        step = TritonStep(
            part.table_R6, part.row_N, part.position_N, pages_RP, self.state.page_size, each, longest
        )
        return Context(rotation.picked(part.tokens), step, step)


def _after(layout: EvenLayout, shape: Shape) -> Tensor | None:
    """The positions that tokens are chosen for, where anybody asks."""
    asked = shape.asked
    return None if asked.kind is None and not asked.early else layout.passes()[0].position_N.long() + 1
