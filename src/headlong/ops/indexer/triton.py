# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
"""An indexer on a GPU: queries are turned, every entry is scored, and the best of them are listed, exactly.

The score that the last of the chosen has is found bit by bit, from the highest on, by counting how many are at least as
large: scores as whole numbers that are ordered alike. Of those that are equal to it the first are taken. Nobody asks
the host how many there are: a token's program goes through its own entries.

Legend. N tokens, H heads (BLOCK_H), E entries, of which a program has BLOCK_E at a time, D columns (BLOCK_D).
  queries_ptr [N, HEADS, DIM]; gates_ptr [N, HEADS]; entries_ptr [pages, PER_PAGE, DIM]; scores_ptr [tokens, most];
  chosen_ptr [N, K]: numbers of entries, ascending, −1 after the last.
  token_rows_ptr, positions_ptr, pages_ptr: as for the attention core.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.compressed_attention.triton_kernels import prepare_kernel
from headlong.ops.indexer.weights import IndexerSizes
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles
from headlong.ops.rope.triton_pairs import turn_args
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait
from headlong.ops.triton_step import TritonStep

SCORED, LISTED = 64, 2048
"""The entries that are scored (BLOCK_E of the first kernel), and looked through, at a time."""
MAX_SCORES = 1 << 26
"""The scores that are held at a time, which bounds the memory of long prompts."""


@triton.jit(do_not_specialize=["stride_pages", "first_token", "most", "scale"])
def score_kernel(
    queries_ptr, gates_ptr, entries_ptr, scores_ptr, token_rows_ptr, positions_ptr, pages_ptr, stride_pages,
    first_token, most, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, RATIO: tl.constexpr, PAGE_SIZE: tl.constexpr, PER_PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Scores a tile of a token's entries."""
    launch_dependents_and_wait()
    token = (first_token + tl.program_id(0)).to(tl.int64)
    position = tl.load(positions_ptr + token)
    ended = (position + 1) // RATIO
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    if tl.program_id(1) * BLOCK_E >= ended:
        return
    row = tl.load(token_rows_ptr + token).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask_H, mask_D, mask_E = h < HEADS, d < DIM, e < ended
    at_E = tl.where(mask_E, (e + 1) * RATIO - 1, 0)
    page_E = tl.load(pages_ptr + row * stride_pages + at_E // PAGE_SIZE).to(tl.int64)
    entry_E = (page_E * PER_PAGE + at_E % PAGE_SIZE // RATIO) * DIM
    keys_ED = tl.load(
        entries_ptr + entry_E[:, None] + d[None, :], mask=mask_E[:, None] & mask_D[None, :], other=0.0
    )
    q_ptrs = queries_ptr + (token * HEADS + h)[None, :] * DIM + d[:, None]
    q_DH = tl.load(q_ptrs, mask=mask_H[None, :] & mask_D[:, None], other=0.0)
    products_EH = tl.maximum(tl.dot(keys_ED, q_DH, input_precision="ieee"), 0.0)
    gate_H = tl.load(gates_ptr + token * HEADS + h, mask=mask_H, other=0.0).to(tl.float32)
    score_E = tl.sum(products_EH * gate_H[None, :], 1) * scale
    tl.store(scores_ptr + (token - first_token) * most + e, score_E, mask=mask_E)


@triton.jit
def _ordered(scores_ptr, e, ended):
    """Scores as whole numbers from 0 on that are ordered alike; 0 where there is no entry."""
    score = tl.load(scores_ptr + e, mask=e < ended, other=0.0) + 0.0  # -0 is 0
    bits = score.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    ordered = tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
    return tl.where(e < ended, ordered + 1, 0)


@triton.jit(do_not_specialize=["first_token", "most", "count"])
def list_kernel(
    scores_ptr, chosen_ptr, positions_ptr, first_token, most, count, RATIO: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Lists the `count` entries of a token with the largest scores, or all where there are no more."""
    launch_dependents_and_wait()
    own = tl.program_id(0).to(tl.int64)
    token = first_token + own
    ended = (tl.load(positions_ptr + token) + 1) // RATIO
    chosen_ptr += token * count
    lane = tl.arange(0, BLOCK_E)
    if ended <= count:
        for first in range(0, count, BLOCK_E):
            e = first + lane
            tl.store(chosen_ptr + e, tl.where(e < ended, e, -1), mask=e < count)
        return
    scores_ptr += own * most
    floor = tl.full((), 0, tl.int64)
    for step in range(33):
        tried = floor + (tl.full((), 1, tl.int64) << (32 - step))
        found = tl.zeros([BLOCK_E], tl.int32)
        for first in range(0, ended, BLOCK_E):
            found += (_ordered(scores_ptr, first + lane, ended) >= tried).to(tl.int32)
        floor = tl.where(tl.sum(found, 0) >= count, tried, floor)
    above = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, ended, BLOCK_E):
        above += (_ordered(scores_ptr, first + lane, ended) > floor).to(tl.int32)
    spare = count - tl.sum(above, 0)
    listed, equals = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, ended, BLOCK_E):
        ordered = _ordered(scores_ptr, first + lane, ended)
        is_equal = (ordered == floor).to(tl.int32)
        rank = equals + tl.cumsum(is_equal, 0)
        takes = ((ordered > floor) | ((is_equal > 0) & (rank <= spare))).to(tl.int32)
        place = listed + tl.cumsum(takes, 0) - 1
        tl.store(chosen_ptr + place, first + lane, mask=takes > 0)
        listed += tl.sum(takes, 0)
        equals += tl.sum(is_equal, 0)


class TritonIndexer:
    """An indexer whose products are in the entries' dtype, into float32."""

    name = "triton"

    def __init__(self, sizes: IndexerSizes) -> None:
        self.sizes = sizes

    def __call__(
        self, queries: Tensor, gates_NH: Tensor, entries: Tensor, angles: Angles, step: PreparedStep
    ) -> Tensor:
        """Returns the numbers of entries [N, at most top_k], ascending, −1 after the last."""
        assert isinstance(step, TritonStep) and entries.is_contiguous()
        s, count = self.sizes, len(queries)
        most = step.longest // s.ratio
        chosen = torch.empty(count, min(s.top_k, most), dtype=torch.int32, device=entries.device)
        turned = None if most <= s.top_k else self._turned(queries, entries, angles)
        each = max(1, MAX_SCORES // most)
        gates = gates_NH.contiguous()
        for first in range(0, count, each):
            tokens = min(each, count - first)
            scores = torch.empty(
                (tokens, most) if turned is not None else (1, 1), dtype=torch.float32, device=entries.device
            )
            if turned is not None:
                score_kernel[tokens, triton.cdiv(most, SCORED)](
                    turned, gates, entries, scores, step.row_N, step.position_N, step.pages_RP,
                    step.pages_RP.stride(0), first, most, s.scale, HEADS=s.num_heads, DIM=s.head_dim, RATIO=s.ratio,
                    PAGE_SIZE=step.page_size, PER_PAGE=entries.shape[1],
                    BLOCK_H=max(16, triton.next_power_of_2(s.num_heads)),
                    BLOCK_D=max(16, triton.next_power_of_2(s.head_dim)), BLOCK_E=SCORED, num_warps=4,
                    **LAUNCH_OPTIONS,
                )  # fmt: skip
            list_kernel[(tokens,)](
                scores, chosen, step.position_N, first, most, chosen.shape[1], RATIO=s.ratio, BLOCK_E=LISTED,
                num_warps=8, **LAUNCH_OPTIONS,
            )  # fmt: skip
        return chosen

    def _turned(self, queries: Tensor, entries: Tensor, angles: Angles) -> Tensor:
        s, count = self.sizes, len(queries)
        turned = entries.new_empty(count, s.num_heads, s.head_dim)
        prepare_kernel[count, s.num_heads](
            queries.contiguous(), queries, turned, turned, None, None, 0.0, 1.0, 0, **turn_args(angles, s.rope),
            HEADS=s.num_heads, DIM=s.head_dim, PAIRS=s.rope.num_pairs, NORMED=False,
            BLOCK_I=max(16, triton.next_power_of_2(s.head_dim // 2)), num_warps=1, **LAUNCH_OPTIONS,
        )  # fmt: skip
        return turned
