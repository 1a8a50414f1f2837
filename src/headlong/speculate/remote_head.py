"""An MTP head that drafts on another device than its target's.

It has a copy of what it needs of the model, keys and values of its own, and the carry. Pages, slots and positions are
the same numbers on both sides. Each step's hidden states and tokens go over, drafts come back; a request that wants
more than the best token is sampled where its settings are, on the target's side.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.models.embeddings import Embeddings
from headlong.models.mtp import MtpHead
from headlong.ops.backend import Backend
from headlong.ops.rope.reference import angles
from headlong.sampling.entries import Entries
from headlong.sampling.sampler import Sampler
from headlong.speculate.mtp import MtpProposer
from headlong.state.state import State
from headlong.types import Batch, Draft, Plan, Verdict


class RemoteHead:
    """An `MtpProposer` on the head's device, and all that travels between the two."""

    device_drafter = None

    def __init__(
        self,
        embeddings: Embeddings,
        head: MtpHead,
        state: State,
        sampler: Sampler,
        draft_tokens_T: Tensor | None = None,
    ) -> None:
        """`embeddings` are the head's own. The state has the head's part on their device."""
        self.inner = MtpProposer(
            embeddings, head, state, _RemoteSampler(sampler, embeddings.ops), draft_tokens_T
        )
        self.max_drafts = self.inner.max_drafts
        self.device = embeddings.ops.device
        self.home = sampler.table.device

    def propose(self, plan: Plan) -> Draft | None:
        with self._there():
            draft = self.inner.propose(plan)
        if draft is None:
            return None
        q_RKV = None if draft.q_RKV is None else draft.q_RKV.to(self.home)
        return replace(draft, tokens_RK=draft.tokens_RK.to(self.home), q_RKV=q_RKV)

    def observe(
        self,
        plan: Plan,
        batch: Batch,
        context: Context,  # noqa: ARG002 - made by the target's ops, for the target's device
        hidden_ND: Tensor,
        verdict: Verdict,
    ) -> None:
        if not any(row.request.draft_tokens for row in plan.rows):
            return
        batch = replace(
            batch,
            next_tokens_N=batch.next_tokens_N.to(self.device),
            positions_N=batch.positions_N.to(self.device),
            pages_RP=batch.pages_RP.to(self.device),
            logits_index_L=batch.logits_index_L.to(self.device),
        )
        assert verdict.tokens_L is not None
        verdict = replace(verdict, tokens_L=verdict.tokens_L.to(self.device))
        with self._there():
            self.inner.observe(plan, batch, self._context(batch), hidden_ND.to(self.device), verdict)

    def flush_deferred(self, row_ids: Iterable[str]) -> None:
        with self._there():
            self.inner.flush_deferred(row_ids)

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def _context(self, batch: Batch) -> Context:
        """The step's context, for the head's ops."""
        model, rows = self.inner.model, batch.rows
        last = max(start + count for start, count in zip(rows.starts, rows.query_lens, strict=True)) - 1
        rotation = angles(batch.positions_N, model.rotary, model.ops.activation_dtype, last)
        page_size = self.inner.state.page_size
        return Context(rotation, model.ops.prepare_attention(rows, batch.pages_RP, page_size))

    def _there(self) -> AbstractContextManager[object]:
        """Kernels run on the device that is current."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class _RemoteSampler(Sampler):
    """Finds best tokens where the logits are; all else it asks the target's sampler for, by a copy of the logits."""

    def __init__(self, sampler: Sampler, ops: Backend) -> None:
        super().__init__(sampler.table, ops.argmax)
        self._sampler = sampler

    def propose(self, logits_LV: Tensor, entries: Entries) -> tuple[Tensor, Tensor | None]:
        tokens_L, q_LV = self._sampler.propose(logits_LV.to(self.table.device), entries)
        return tokens_L.to(logits_LV.device), None if q_LV is None else q_LV.to(logits_LV.device)
