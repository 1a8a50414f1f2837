"""How the MTP head reads pairs (target hidden, next token) it did not see at once.

A pair leaves keys and values behind; what the head says of it is wanted of a row's last pair alone. Many pairs are
therefore read in two passes: keys and values of all but the last ones, then the last ones whole. Knows pages and
positions, not who waits for what.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.models.ends import Ends
from headlong.models.mtp import MtpHead
from headlong.ops.rope.reference import angles
from headlong.state.pages import page_table
from headlong.state.state import RowState, State
from headlong.types import Rows

WHOLE, WHOLE_ON_GPU = 8, 256
"""So many pairs at most are read whole in one pass: the second pass would cost more than it saves."""


class Pairs(NamedTuple):
    """A row's pairs at positions `start`, `start` + 1, …: a hidden state each, and the token after it."""

    held: RowState
    start: int
    hidden_ND: Tensor
    tokens_N: Tensor

    @property
    def end(self) -> int:
        return self.start + self.tokens_N.shape[0]

    def part(self, first: int, last: int) -> "Pairs":
        """Those at positions first…last − 1."""
        own = slice(first - self.start, last - self.start)
        return Pairs(self.held, first, self.hidden_ND[own], self.tokens_N[own])


class PairReader:
    """One head over the state it shares with its target."""

    def __init__(self, model: Ends, head: MtpHead, state: State) -> None:
        self.model = model
        self.head = head
        self.state = state

    def read(self, rows: list[Pairs]) -> None:
        """Primes the head with these pairs; the last of each row gives its carry. Later than at once makes no
        difference: what a pair leaves depends on the pairs before it alone."""
        if sum(row.end - row.start for row in rows) > WHOLE:
            if earlier := [row.part(row.start, row.end - 1) for row in rows if row.end > row.start + 1]:
                self.write(earlier)
            rows = [row.part(row.end - 1, row.end) for row in rows]
        lens = tuple(row.end - row.start for row in rows)
        context = self._context(rows, [row.start for row in rows], lens, [row.held.pages for row in rows])
        out_ND = self.head.forward(*self._inputs(rows), context, self.state.layers)
        last, total = [], 0
        for length in lens:
            total += length
            last.append(total - 1)
        slots = torch.tensor([row.held.slot for row in rows], device=out_ND.device)
        self.state.carry_SD[slots] = out_ND[torch.tensor(last, device=out_ND.device)]

    def write(self, rows: list[Pairs]) -> None:
        """Keys and values alone. Every page is shown as a sequence of its own, so that a long past costs nothing."""
        size = self.state.page_size
        starts, lens, pages = [], [], []
        for row in rows:
            position, end = row.start, row.end
            while position < end:
                count = min(end, position - position % size + size) - position
                starts.append(position % size)
                lens.append(count)
                pages.append([row.held.pages[position // size]])
                position += count
        context = self._context(rows, starts, tuple(lens), pages)
        self.head.remember(*self._inputs(rows), context, self.state.layers)

    def _inputs(self, rows: list[Pairs]) -> tuple[Tensor, Tensor]:
        if len(rows) == 1:
            return self.model.embed(rows[0].tokens_N), rows[0].hidden_ND
        tokens_N = torch.cat([row.tokens_N for row in rows])
        return self.model.embed(tokens_N), torch.cat([row.hidden_ND for row in rows])

    def _context(
        self, rows: list[Pairs], starts: list[int], lens: tuple[int, ...], pages: list[list[int]]
    ) -> Context:
        """Rotations by the pairs' true positions; where they are written, by the starts and pages given."""
        ops, device = self.model.ops, self.state.carry_SD.device
        positions_N = torch.cat([torch.arange(row.start, row.end, device=device) for row in rows])
        last = max(row.end for row in rows) - 1
        rotation = angles(positions_N, self.model.rotary, ops.activation_dtype, last)
        nothing = (0,) * len(lens)
        step = Rows(nothing, tuple(starts), lens, nothing, nothing)
        return Context(rotation, ops.plan_attention(step, page_table(pages, device), self.state.page_size))
