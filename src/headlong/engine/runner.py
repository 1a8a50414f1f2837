"""Turns a plan and its drafts into one ragged batch and runs the model over it. Decides nothing."""

from collections.abc import Sequence
from operator import add

from torch import Tensor

from headlong.layers.context import Context
from headlong.models.decoder import DecoderModel
from headlong.ops.cuda_graphs import CudaGraphs
from headlong.ops.rope.reference import angles
from headlong.ops.upload import upload
from headlong.state.pages import page_table
from headlong.state.specs import conv_span
from headlong.state.state import State
from headlong.types import Batch, Draft, Plan, RowPlan, Rows

MAX_CAPTURED = 512
"""The most tokens of a step that is captured as a CUDA graph. Prompts come in too many lengths."""


class Runner:
    """One model over one state."""

    def __init__(self, model: DecoderModel, state: State) -> None:
        self.model = model
        self.state = state
        self.device = model.ops.device
        self.graphs = CudaGraphs(self.device) if model.capturable else None
        self.is_usual = True
        """Whether the last pass took as long as such passes do: no CUDA graph was captured on the way."""
        self.conv_kernel = conv_span(model.state_specs.values())

    def batch(self, plan: Plan, draft: Draft | None) -> Batch:
        """Host-known tokens and positions travel once; last tokens and drafts are already on the device."""
        tokens, following, positions, logits_index = [], [], [], []
        decoding: list[tuple[int, int, RowPlan]] = []
        for number, row in enumerate(plan.rows):
            first = len(tokens)
            if row.known_tokens:
                tokens.extend(row.known_tokens[: row.query_len])
                after = row.known_tokens[1 : row.query_len + 1]
                following.extend([*after, *([0] * (row.query_len - len(after)))])
            else:
                tokens.extend([0] * row.query_len)
                following.extend([0] * row.query_len)
                decoding.append((number, first, row))
            positions.extend(range(row.start, row.start + row.query_len))
            logits_index.extend(range(first + row.query_len - row.num_logits, first + row.query_len))
        if decoding and self.device.type == "cpu":
            self._fill_here(tokens, decoding, draft)
        tokens_N, next_tokens_N, positions_N, logits_index_L = upload(
            [tokens, following, positions, logits_index], self.device
        )
        if decoding and self.device.type != "cpu":
            self._fill_there(tokens_N, decoding, draft)
        return Batch(
            tokens_N=tokens_N,
            next_tokens_N=next_tokens_N,
            positions_N=positions_N,
            pages_RP=page_table([row.pages for row in plan.rows], self.device),
            logits_index_L=logits_index_L,
            rows=Rows(
                slots=tuple(row.slot for row in plan.rows),
                starts=tuple(row.start for row in plan.rows),
                query_lens=tuple(row.query_len for row in plan.rows),
                num_drafts=tuple(row.num_drafts for row in plan.rows),
                num_replay=tuple(row.num_replay for row in plan.rows),
            ),
        )

    def context(self, batch: Batch) -> Context:
        ops = self.model.ops
        last = max(map(add, batch.rows.starts, batch.rows.query_lens)) - 1
        rotation = angles(batch.positions_N, self.model.rotary, ops.activation_dtype, last)
        attention = ops.prepare_attention(batch.rows, batch.pages_RP, self.state.page_size)
        if self.conv_kernel is None:
            return Context(rotation, attention)
        window = self.conv_kernel - 1 + self.state.max_drafts
        delta_net = ops.prepare_delta_net(batch.rows, self.conv_kernel, window, attention)
        return Context(rotation, attention, delta_net)

    def forward(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """Hidden states of all tokens, and logits of those that want them."""
        self.is_usual = True
        if self.graphs is not None and self._comes_again(batch):
            found = self._replay(self.graphs, batch, context)
            self.is_usual = self.graphs.is_usual
            return found
        hidden_ND = self.model.forward(batch.tokens_N, context, self.state.layers)
        if not len(batch.logits_index_L):
            return hidden_ND, hidden_ND.new_empty(0, self.model.config.vocab_size)
        return hidden_ND, self.model.logits(hidden_ND[batch.logits_index_L])

    def _comes_again(self, batch: Batch) -> bool:
        """Whether steps of this shape are to be expected: rows that decode, and few enough."""
        lens = batch.rows.query_lens
        return (
            max(lens) <= 1 + self.state.max_drafts
            and sum(lens) <= MAX_CAPTURED
            and len(batch.logits_index_L) > 0
        )

    def _replay(self, graphs: CudaGraphs, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """Runs the pass as one CUDA graph."""

        def run(given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            tokens_N, logits_index_L, *rest = given
            hidden_ND = self.model.forward(tokens_N, context.over(rest), self.state.layers)
            return hidden_ND, self.model.logits(hidden_ND[logits_index_L])

        given = (batch.tokens_N, batch.logits_index_L, *context.tensors)
        hidden_ND, logits_LV = graphs(context.key, run, given)
        return hidden_ND.clone(), logits_LV  # rows keep theirs beyond the next step

    def _fill_here(
        self, tokens: list[int], decoding: list[tuple[int, int, RowPlan]], draft: Draft | None
    ) -> None:
        """Decoding rows' tokens put in place, where the device is the host."""
        last = self.state.last_token_S.tolist()
        drafts = [] if draft is None else draft.tokens_RK.tolist()
        for number, first, row in decoding:
            tokens[first] = last[row.slot]
            if row.num_drafts:
                tokens[first + 1 : first + 1 + row.num_drafts] = drafts[number][: row.num_drafts]

    def _fill_there(
        self, tokens_N: Tensor, decoding: list[tuple[int, int, RowPlan]], draft: Draft | None
    ) -> None:
        """The same without reading anything back."""
        places = [
            (first + 1 + k, number, k) for number, first, row in decoding for k in range(row.num_drafts)
        ]
        lists = [[first for _, first, _ in decoding], [row.slot for _, _, row in decoding]]
        lists += [list(column) for column in zip(*places, strict=True)] if places else []
        first_D, slot_D, *rest = upload(lists, self.device)
        tokens_N[first_D] = self.state.last_token_S[slot_D]
        if places:
            assert draft is not None
            at_M, row_M, depth_M = rest
            tokens_N[at_M] = draft.tokens_RK[row_M, depth_M]
