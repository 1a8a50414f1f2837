"""Drafts with a second, smaller model that has the target's vocabulary and a state of its own.

Before it drafts, it reads what the rows committed since it last looked, all of them in one ragged pass; a long
prompt in chunks, and such a row drafts nothing until it is read. Then each pass gives one more token of every row.
What it fed of its own drafts is committed by its state's `commit`, like the target's. Rows that are not asked to
draft cost nothing. Knows rows and passes, not who decides.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headlong.errors import ConfigError
from headlong.layers.context import Context
from headlong.models.decoder import DecoderModel
from headlong.sampling.sampler import Sampler
from headlong.speculate.choosing import HostChoice
from headlong.speculate.draft_loop import make_drafts, spread
from headlong.speculate.history import Text, Texts
from headlong.speculate.live_rows import LiveRows
from headlong.state.pages import page_table
from headlong.state.specs import Rollback
from headlong.state.state import RowState, State
from headlong.types import Batch, Draft, Plan, RowPlan, Rows, Verdict


class ModelRunner(Protocol):
    """A model over its state."""

    model: DecoderModel
    state: State

    def batch(self, plan: Plan, draft: Draft | None) -> Batch: ...
    def context(self, batch: Batch) -> Context: ...
    def forward(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]: ...


def check_vocabulary(drafter: int, target: int) -> None:
    """Drafts are token ids of the target: both must number the same tokens."""
    if drafter != target:
        raise ConfigError(
            f"drafter has a vocabulary of {drafter} tokens, the model one of {target}; "
            "choose a draft model with the same tokenizer"
        )


@dataclass(frozen=True)
class _Prefill:
    """A row as the target's plan has it, and its part of a pass over the drafter's own state."""

    row: RowPlan
    own: RowPlan


class DraftModelProposer:
    """`state` is the target's; the runner's is the drafter's own, with room for as many drafts."""

    device_drafter = None

    def __init__(self, runner: ModelRunner, state: State, sampler: Sampler, chunk_tokens: int) -> None:
        check_vocabulary(runner.model.config.vocab_size, sampler.table.vocab_size)
        assert runner.state.max_drafts >= state.max_drafts and runner.state.slots.size >= state.slots.size
        self.max_drafts = state.max_drafts
        self.texts = Texts(state)
        self.own = runner.state
        self._runner = runner
        self._sampler = sampler
        self._chunk_tokens = chunk_tokens
        self._read: dict[str, tuple[Text, int]] = {}
        """The text that each row's state consists of, and its version; not there while a pass is under way."""
        self._fed: dict[str, RowPlan] = {}
        """Rows with drafts in the state that are not committed: the pass that fed the last of them."""
        specs = runner.model.state_specs.values()
        self._refeeds = any(spec.rollback is Rollback.REPLAY for spec in specs)

    def propose(self, plan: Plan) -> Draft | None:
        self.texts.follow(plan)
        self._commit({})  # what a step that failed left open
        self._forget([row_id for row_id in self.own.rows if row_id not in self.texts])
        prefills = self._plan_prefills(plan)
        if not prefills:
            return None
        logits_DV = self._catch_up(Plan(tuple(each.own for each in prefills), 0))
        drafting = [each.row for each in prefills if each.own.samples]
        return self._draft(plan, drafting, logits_DV) if drafting else None

    def observe(
        self,
        plan: Plan,
        batch: Batch,  # noqa: ARG002
        context: Context,  # noqa: ARG002
        hidden_ND: Tensor,  # noqa: ARG002
        verdict: Verdict,
    ) -> None:
        self.texts.observe(plan, verdict)
        accepted = zip(plan.rows, verdict.accepted, strict=True)
        self._commit({row.request.id: count for row, count in accepted})

    def flush_deferred(self, row_ids: Iterable[str]) -> None:
        """Does nothing: the target's pages have nothing of it."""

    def check_integrity(self) -> None:
        self.own.check_integrity()
        assert set(self._read) <= set(self.own.rows) and set(self._fed) <= set(self.own.rows)
        for row_id, held in self.own.rows.items():
            assert row_id in self.texts, f"{row_id}: the draft model reads a row that nobody has"
            text = self.texts[row_id]
            if self._read.get(row_id) == (text, text.version):
                assert held.length <= len(text.tokens), f"{row_id}: the draft model read more than there is"

    def _commit(self, accepted: dict[str, int]) -> None:
        """Keeps the accepted among the drafts that were fed; what is not told was not."""
        if not self._fed:
            return
        rows = tuple(self._fed.values())
        kept = tuple(min(accepted.get(row.request.id, 0), row.num_drafts) for row in rows)
        self._fed = {}
        self.own.commit(Plan(rows, max(row.num_drafts for row in rows)), kept)

    def _forget(self, row_ids: Sequence[str]) -> None:
        for row_id in row_ids:
            self.own.release(row_id)
            self._read.pop(row_id, None)

    def _plan_prefills(self, plan: Plan) -> list[_Prefill]:
        """Who reads how much: rows that are nearly up to date all of it, the others what is left of a chunk."""
        budget, prefills = self._chunk_tokens, []
        waiting = [(row, held) for row in plan.drafting if (held := self._hold(row)) is not None]
        waiting.sort(key=lambda pair: len(self.texts[pair[0].request.id].tokens) - pair[1].length)
        for row, held in waiting:
            tokens = self.texts[row.request.id].tokens
            unread = len(tokens) - held.length
            is_behind = unread > self.max_drafts + 1
            count = min(unread, budget) if is_behind else unread
            drafts = row.num_drafts - 1 if count == unread else 0
            if not count or not self.own.reserve(row.request.id, held.length + count + drafts):
                continue
            budget -= count if is_behind else 0
            known = tuple(tokens[held.length : held.length + count])
            own = _own_plan(row, held, count, known_tokens=known, samples=count == unread)
            prefills.append(_Prefill(row, own))
        return sorted(prefills, key=lambda each: -each.own.query_len)

    def _hold(self, row: RowPlan) -> RowState | None:
        """The row's place in the own state, from the beginning if its text is not what was read. None if the row
        cannot be followed."""
        row_id = row.request.id
        text = self.texts[row_id]
        longest = self._runner.model.config.max_position
        if not text.complete or len(text.tokens) + row.num_drafts - 1 > longest:
            return None
        held = self.own.rows.get(row_id)
        # All of it was read already: the step after that failed, and the logits are gone.
        if held is not None and (
            self._read.get(row_id) != (text, text.version) or held.length >= len(text.tokens)
        ):
            self._forget([row_id])
            held = None
        if held is None:
            held = self.own.admit(row_id)
            assert held is not None, "there is a slot for every row of the target"
            self._read[row_id] = (text, text.version)
        return held

    def _catch_up(self, reading: Plan) -> Tensor:
        """Reads, and gives the logits of the rows that are up to date then."""
        known = [(row.request.id, self._read.pop(row.request.id)) for row in reading.rows]
        batch = self._runner.batch(reading, None)
        _, logits_DV = self._runner.forward(batch, self._runner.context(batch))
        self.own.commit(reading, (0,) * len(reading.rows))
        self._read.update(known)
        return logits_DV

    def _draft(self, plan: Plan, drafting: list[RowPlan], logits_DV: Tensor) -> Draft | None:
        """Goes on from the logits of each row's last token."""
        live, place = LiveRows(plan, drafting), {row.request.id: n for n, row in enumerate(plan.rows)}
        passes = _Passes(self, drafting, logits_DV)
        made = make_drafts(passes, HostChoice(self._sampler, drafting), live)
        return spread(plan, [place[row.request.id] for row in drafting], made, live.counts)

    def feed(self, rows: list[RowPlan], drafts: Sequence[Tensor]) -> Tensor:
        """Logits after each row's drafts. Keys and values of the earlier ones are in place; into a recurrent memory
        they go for good or not at all, so there all of them are fed again."""
        count = len(drafts)
        fed = count if self._refeeds else 1
        own = []
        for row in rows:
            own.append(_own_plan(row, self.own.rows[row.request.id], count, num_drafts=count))
            self._fed[row.request.id] = own[-1]
        starts = [row.start + count - fed for row in own]
        # A step has at least one certain token; this one is nobody's, in page 0 and slot 0.
        spare = 1 if self._refeeds else 0
        device = drafts[0].device
        positions = [0] * spare + [start + i for start in starts for i in range(fed)]
        last = torch.arange(len(own), device=device) * fed + fed - 1 + spare
        batch = Batch(
            tokens_N=torch.cat(
                (last.new_zeros(spare), torch.stack(list(drafts[count - fed :]), dim=1).flatten())
            ),
            next_tokens_N=last[:0],
            positions_N=torch.tensor(positions, device=device),
            pages_RP=page_table([[0]] * spare + [row.pages for row in own], device),
            logits_index_L=last,
            rows=Rows(
                slots=(*([0] * spare), *(row.slot for row in own)),
                starts=(*([0] * spare), *starts),
                query_lens=(*([1] * spare), *([fed] * len(own))),
                num_drafts=(*([0] * spare), *([fed] * len(own))),
                num_replay=(0,) * (spare + len(own)),
            ),
        )
        return self._runner.forward(batch, self._runner.context(batch))[1]


class _Passes:
    """The draft model's passes: the one that read what was committed, then one more token of every row."""

    def __init__(self, proposer: DraftModelProposer, rows: list[RowPlan], logits_DV: Tensor) -> None:
        self._proposer, self._rows, self._logits_DV = proposer, rows, logits_DV

    def first(self) -> Tensor:
        return self._logits_DV

    def after(self, drafts: Sequence[Tensor], live: list[int], stay: list[int] | None) -> Tensor:  # noqa: ARG002
        """Logits of the rows that go on."""
        return self._proposer.feed([self._rows[number] for number in live], drafts)


def _own_plan(
    row: RowPlan,
    held: RowState,
    query_len: int,
    *,
    num_drafts: int = 0,
    known_tokens: tuple[int, ...] = (),
    samples: bool = False,
) -> RowPlan:
    """The row in the drafter's own state."""
    return RowPlan(
        request=row.request,
        slot=held.slot,
        start=held.length,
        query_len=query_len,
        num_drafts=num_drafts,
        num_replay=held.num_replay,
        pages=tuple(held.pages),
        samples=samples,
        num_generated=row.num_generated,
        known_tokens=known_tokens,
    )
