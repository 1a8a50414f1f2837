"""How the MTP head reads pairs (target hidden, next token) it did not see at once.

A pair leaves keys and values behind; what the head says of it is wanted of a row's last pair alone. Many pairs are
therefore read in two passes: keys and values of all but the last ones, then the last ones whole. Knows pages and
positions, not who waits for what.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.models.embeddings import Embeddings
from headlong.models.mtp import MtpHead
from headlong.ops.rope.reference import angles
from headlong.ops.upload import upload
from headlong.state.deferred_kv import OnPage
from headlong.state.pages import page_table
from headlong.state.state import RowState, State
from headlong.types import Rows

WHOLE, WHOLE_ON_GPU = 8, 256
"""The most pairs that are read whole in one pass: the second pass would cost more than it saves."""


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
        """The pairs at positions first…last − 1."""
        own = slice(first - self.start, last - self.start)
        return Pairs(self.held, first, self.hidden_ND[own], self.tokens_N[own])

    def on_pages(self, size: int) -> list[OnPage]:
        """The same, page by page."""
        pieces, position = [], self.start
        while position < self.end:
            until = min(self.end, position - position % size + size)
            part = self.part(position, until)
            pieces.append(OnPage(self.held.pages[position // size], position, part.hidden_ND, part.tokens_N))
            position = until
        return pieces


class PairReader:
    """One head over the state it shares with its target."""

    def __init__(self, model: Embeddings, head: MtpHead, state: State) -> None:
        self.model = model
        self.head = head
        self.state = state

    def forward(self, tokens_N: Tensor, hidden_ND: Tensor, context: Context, depth: int = 0) -> Tensor:
        """The head's output for pairs, at a depth of drafts."""
        return self.head.forward(self.model.embed(tokens_N), hidden_ND, context, self.state.layers, depth)

    def read(self, rows: list[Pairs], deferred: Sequence[OnPage] = ()) -> None:
        """Primes the head with these pairs; the last of each row gives its carry. Later than at once makes no
        difference: what a pair leaves depends on the pairs before it alone. What is `deferred` is written before
        them."""
        earlier = list(deferred)
        if sum(row.end - row.start for row in rows) > WHOLE:
            for row in rows:
                earlier += row.part(row.start, row.end - 1).on_pages(self.state.page_size)
            rows = [row.part(row.end - 1, row.end) for row in rows]
        if earlier:
            self.write(earlier)
        lens = tuple(row.end - row.start for row in rows)
        context = self._context(rows, [row.start for row in rows], lens, [row.held.pages for row in rows])
        out_ND = self.forward(*self._inputs(rows), context)
        last, total = [], 0
        for length in lens:
            total += length
            last.append(total - 1)
        slots = torch.tensor([row.held.slot for row in rows], device=out_ND.device)
        self.state.carry_SD[slots] = out_ND[torch.tensor(last, device=out_ND.device)]

    def write(self, pieces: Sequence[OnPage]) -> None:
        """Keys and values alone. Every page is shown as a sequence of its own, so that a long past costs nothing."""
        size = self.state.page_size
        starts, lens = [piece.start % size for piece in pieces], tuple(piece.num_pairs for piece in pieces)
        context = self._context(pieces, starts, lens, [[piece.page] for piece in pieces])
        tokens_N, hidden_ND = self._inputs(pieces)
        self.head.remember(self.model.embed(tokens_N), hidden_ND, context, self.state.layers)

    def _inputs(self, parts: Sequence[Pairs | OnPage]) -> tuple[Tensor, Tensor]:
        if len(parts) == 1:
            return parts[0].tokens_N, parts[0].hidden_ND
        tokens_N = torch.cat([part.tokens_N for part in parts])
        return tokens_N, torch.cat([part.hidden_ND for part in parts])

    def _context(
        self,
        parts: Sequence[Pairs | OnPage],
        starts: list[int],
        lens: tuple[int, ...],
        pages: list[list[int]],
    ) -> Context:
        """Rotations by the pairs' true positions; where they are written, by the starts and pages given."""
        ops, device = self.model.ops, self.state.carry_SD.device
        positions: list[int] = []
        for part, count in zip(parts, lens, strict=True):
            positions.extend(range(part.start, part.start + count))
        (positions_N,) = upload([positions], device)
        rotation = angles(positions_N, self.model.rotary, ops.activation_dtype, max(positions))
        nothing = (0,) * len(lens)
        step = Rows(nothing, tuple(starts), lens, nothing, nothing)
        return Context(rotation, ops.prepare_attention(step, page_table(pages, device), self.state.page_size))
