"""Drafts by looking up: where the row's last tokens stood before in its own text, what followed follows again.

Works on the host, with an index that grows with the text; nothing is scanned twice. Knows tokens, no model. The
drafts do not depend on any noise: q is one at the token and zero elsewhere.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.sampling.sampler import needs_q
from headlong.speculate.history import Text, Texts
from headlong.state.state import State
from headlong.types import Batch, Draft, Plan, RowPlan, Verdict

MIN_MATCH = 2
MAX_MATCH = 6
"""A place is a match if this many of the last tokens stood there; of several the longest counts, then the latest."""
MAX_CANDIDATES = 32
"""Places looked at in one search, latest first."""
MAX_TABLE_BITS = 16
MANY = 64
"""Tokens from which on hashing them all at once is the quicker way."""
_FACTOR = 0x9E3779B1


class SuffixIndex:
    """Where in a text each run of `min_match` tokens ended before. Hash chains, in 4 bytes a token and a table."""

    def __init__(self, text: Text, min_match: int, max_match: int) -> None:
        self.text = text
        self.version = text.version
        self._min_match = min_match
        self._max_match = max_match
        longest = len(text.request.prompt) + text.request.params.max_tokens
        bits = min(max(longest, 256).bit_length(), MAX_TABLE_BITS)
        self._shift = 32 - bits
        self._newest = array("i", [-1]) * (1 << bits)
        """The last place where a run with each hash ended."""
        self._older = array("i")
        """The place before each place that has the same hash."""

    @property
    def nbytes(self) -> int:
        return (len(self._newest) + len(self._older)) * self._newest.itemsize

    def follow(self) -> None:
        """Takes in what the text gained, but for the run that ends it: that one is looked for."""
        first, last = len(self._older), len(self.text.tokens) - 1
        if last - first > MANY:
            keys = self._keys(first, last)
        else:
            tokens, length = self.text.tokens, self._min_match
            keys = [self._key(tokens[max(0, end + 1 - length) : end + 1]) for end in range(first, last)]
        for end, key in enumerate(keys, first):
            if key is None:
                self._older.append(-1)
            else:
                self._older.append(self._newest[key])
                self._newest[key] = end

    def continuation(self, extra: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that would follow the text and `extra`, or none. A match that overlaps the end
        repeats itself."""
        tokens = self.text.tokens
        after = self._find([*tokens[-self._max_match :], *extra][-self._max_match :])
        made = list(extra)
        if after is not None:
            for place in range(after, after + count):
                token = tokens[place] if place < len(tokens) else made[place - len(tokens)]
                if token < 0:
                    break
                made.append(token)
        return made[len(extra) :]

    def _find(self, tail: list[int]) -> int | None:
        """The place after the longest match of the tail, the latest among equals."""
        key = self._key(tail[-self._min_match :])
        if key is None:
            return None
        end, best, longest = self._newest[key], None, self._min_match - 1
        for _ in range(MAX_CANDIDATES):
            if end < 0 or longest == len(tail):
                break
            length = self._agreeing(tail, end)
            if length > longest:
                best, longest = end + 1, length
            end = self._older[end]
        return best

    def _agreeing(self, tail: list[int], end: int) -> int:
        tokens, length = self.text.tokens, 0
        while length < len(tail) and length <= end and tokens[end - length] == tail[-1 - length]:
            length += 1
        return length

    def _key(self, run: Sequence[int]) -> int | None:
        """None for a run that is too short or not known."""
        if len(run) < self._min_match or min(run) < 0:
            return None
        key = 0
        for token in run:
            key = (key + token) * _FACTOR & 0xFFFFFFFF
        return key >> self._shift

    def _keys(self, first: int, last: int) -> list[int | None]:
        """`_key` of the runs that end at `first` up to `last`, for a whole prompt at once."""
        length = self._min_match
        begin = max(0, first + 1 - length)
        tokens = np.array(self.text.tokens[begin:last])
        count = max(0, len(tokens) + 1 - length)
        keys, known = np.zeros(count, dtype=np.uint32), np.ones(count, dtype=bool)
        for place in range(length):
            part = tokens[place : place + count]
            keys = (keys + part.astype(np.uint32)) * np.uint32(_FACTOR)
            known &= part >= 0
        found = np.where(known, (keys >> self._shift).astype(np.int64), -1).tolist()
        return [*([None] * (last - first - count)), *(None if key < 0 else key for key in found)]


class NgramProposer:
    """One index for each row that drafts, made when it first does and gone with the row."""

    device_drafter = None

    def __init__(
        self, state: State, vocab_size: int, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH
    ) -> None:
        assert 1 <= min_match <= max_match
        self.max_drafts = state.max_drafts
        self.texts = Texts(state)
        self.indexes: dict[str, SuffixIndex] = {}
        self._vocab_size = vocab_size
        self._matches = (min_match, max_match)
        self._device = state.last_token_S.device

    def propose(self, plan: Plan) -> Draft | None:
        return self.extend(plan, None)

    def extend(self, plan: Plan, draft: Draft | None) -> Draft | None:
        """Goes on after another's drafts, which say their counts, to the depths that are planned."""
        self.texts.follow(plan)
        self.indexes = {row_id: index for row_id, index in self.indexes.items() if row_id in self.texts}
        counts = [0] * len(plan.rows) if draft is None else list(draft.counts or ())
        wanting = [n for n, row in enumerate(plan.rows) if row.num_drafts > counts[n]]
        before = draft.tokens_RK.tolist() if draft is not None and wanting else [[]] * len(plan.rows)
        places: list[tuple[int, int, int]] = []
        for n in wanting:
            row, given = plan.rows[n], counts[n]
            line = self._index(row).continuation(before[n][:given], row.num_drafts - given)
            places.extend((n, given + i, token) for i, token in enumerate(line))
            counts[n] += len(line)
        if not places:
            return draft
        shape = (len(plan.rows), max(counts))
        return Draft(self._tokens(draft, places, shape), self._q(plan, draft, places, shape), tuple(counts))

    def observe(
        self,
        plan: Plan,
        batch: Batch,  # noqa: ARG002
        context: Context,  # noqa: ARG002
        hidden_ND: Tensor,  # noqa: ARG002
        verdict: Verdict,
    ) -> None:
        self.texts.observe(plan, verdict)

    def flush_deferred(self, row_ids: Iterable[str]) -> None:
        """Does nothing: the target's pages have nothing of it."""

    def check_integrity(self) -> None:
        assert all(row_id in self.texts for row_id in self.indexes), "an index whose row is gone"

    def _index(self, row: RowPlan) -> SuffixIndex:
        text = self.texts[row.request.id]
        index = self.indexes.get(row.request.id)
        if index is None or index.text is not text or index.version != text.version:
            index = self.indexes[row.request.id] = SuffixIndex(text, *self._matches)
        index.follow()
        return index

    def _tokens(
        self, draft: Draft | None, places: list[tuple[int, int, int]], shape: tuple[int, int]
    ) -> Tensor:
        tokens_RK = torch.zeros(shape, dtype=torch.long, device=self._device)
        if draft is not None:
            tokens_RK[:, : draft.tokens_RK.shape[1]] = draft.tokens_RK
        row, place, token = torch.tensor(places, device=self._device).T
        tokens_RK[row, place] = token
        return tokens_RK

    def _q(
        self, plan: Plan, draft: Draft | None, places: list[tuple[int, int, int]], shape: tuple[int, int]
    ) -> Tensor | None:
        """Rows that are judged by q always get it: how a row is judged must not depend on its company."""
        own = [place for place in places if needs_q(plan.rows[place[0]].request.params)]
        given = draft.q_RKV if draft is not None else None
        if not own and given is None:
            return None
        q_RKV = torch.zeros(*shape, self._vocab_size, dtype=torch.float64, device=self._device)
        if given is not None:
            q_RKV[:, : given.shape[1]] = given
        if own:
            q_RKV[tuple(torch.tensor(own, device=self._device).T)] = 1.0
        return q_RKV
