# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
"""A compressor on a GPU: one kernel makes the entries that end in a step, another keeps the tokens in the ring.

Every token has a program, and those of tokens that end no entry do nothing, so that nobody asks which do. Sums go over
the tokens of a span in tiles of one size.

Legend. N tokens, J tokens of a span, of which a tile has BLOCK_J, I pairs of an entry.
  given_ptr [N, WIDTH]: values and then gates of each series, in the ring's dtype and with the bias added; ring_ptr
  [slots, LENGTH, WIDTH]; entries_ptr [pages, PER_PAGE, DIM]; norm_ptr [DIM]; fixed_cos_ptr, fixed_sin_ptr [PAIRS]: the
  turn from an entry's last token back to the first of its window.
  rows_ptr, token_rows_ptr, positions_ptr, pages_ptr: as for the attention core.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.compressor.weights import CompressorWeights
from headlong.ops.gated_attention.triton_kernels import FIELDS, QUERY_LEN, START
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.pairs import fixed_turn
from headlong.ops.rope.reference import Angles
from headlong.ops.rope.triton_pairs import load_turn, turn_args
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait
from headlong.ops.triton_step import TritonStep

BLOCK = 1024
"""The numbers of a token that a program keeps."""


@triton.jit
def biased_kernel(
    given_ptr, bias_ptr, positions_ptr, out_ptr, RATIO: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the bias of a token's place to its gates, in the ring's dtype."""
    launch_dependents_and_wait()
    token, x = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, half = tl.load(positions_ptr + token) % RATIO, WIDTH // 2
    is_gate = (x >= half) & (x < WIDTH)
    bias = tl.load(bias_ptr + place * half + x - half, mask=is_gate, other=0.0)
    given = tl.load(given_ptr + token * WIDTH + x, mask=x < WIDTH, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + x, (given + bias).to(out_ptr.dtype.element_ty), mask=x < WIDTH)


@triton.jit
def keep_kernel(
    given_ptr, ring_ptr, rows_ptr, token_rows_ptr, positions_ptr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores a token in its slot's ring, if it is among the latest of its row."""
    launch_dependents_and_wait()
    token, x = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = rows_ptr + tl.load(token_rows_ptr + token) * FIELDS
    position = tl.load(positions_ptr + token)
    end = tl.load(row_ptr + START) + tl.load(row_ptr + QUERY_LEN)
    if position >= end - LENGTH:
        place = tl.load(row_ptr).to(tl.int64) * LENGTH + position % LENGTH
        given = tl.load(given_ptr + token * WIDTH + x, mask=x < WIDTH, other=0.0)
        tl.store(ring_ptr + place * WIDTH + x, given, mask=x < WIDTH)


@triton.jit
def _pairs_of_span(
    given_ptr, ring_ptr, token, position, start, slot, j_J, column, i,
    RATIO: tl.constexpr, SPAN: tl.constexpr, SERIES: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Loads of some tokens of a span the numbers at even and at odd places from `column` on, of the series that counts
    there, and which of the tokens there are."""
    p_J = position - SPAN + 1 + j_J
    exists_J = (p_J >= 0) & (j_J < SPAN)
    series_J = j_J // RATIO if SERIES > 1 else j_J * 0
    at_JI = (column + series_J * DIM)[:, None] + 2 * i[None, :]
    mask_JI = exists_J[:, None] & (2 * i < DIM)[None, :]
    new_JI, old_JI = mask_JI & (p_J >= start)[:, None], mask_JI & (p_J < start)[:, None]
    new_ptrs = given_ptr + (token + p_J - position).to(tl.int64)[:, None] * WIDTH + at_JI
    old_ptrs = ring_ptr + (slot * LENGTH + tl.where(p_J < 0, 0, p_J) % LENGTH)[:, None] * WIDTH + at_JI
    even = tl.load(new_ptrs, mask=new_JI, other=0.0) + tl.load(old_ptrs, mask=old_JI, other=0.0)
    odd = tl.load(new_ptrs + 1, mask=new_JI, other=0.0) + tl.load(old_ptrs + 1, mask=old_JI, other=0.0)
    return even.to(tl.float32), odd.to(tl.float32), exists_J


@triton.jit(do_not_specialize=["stride_pages", "stride_turns", "first_cos", "first_sin"])
def make_kernel(
    given_ptr, ring_ptr, entries_ptr, norm_ptr, eps_ptr, fixed_cos_ptr, fixed_sin_ptr, rows_ptr, token_rows_ptr,
    positions_ptr, pages_ptr, stride_pages, cos_ptr, sin_ptr, stride_turns, first_cos, first_sin,
    RATIO: tl.constexpr, SPAN: tl.constexpr, SERIES: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, PER_PAGE: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Makes the entry that ends with a token, if one does."""
    launch_dependents_and_wait()
    token = tl.program_id(0)
    position = tl.load(positions_ptr + token)
    if (position + 1) % RATIO != 0:
        return
    row = tl.load(token_rows_ptr + token).to(tl.int64)
    slot, start = tl.load(rows_ptr + row * FIELDS).to(tl.int64), tl.load(rows_ptr + row * FIELDS + START)
    i, j_J = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    most_even = tl.full([BLOCK_I], float("-inf"), tl.float32)
    most_odd = most_even
    for first in range(0, SPAN, BLOCK_J):
        even, odd, exists_J = _pairs_of_span(
            given_ptr, ring_ptr, token, position, start, slot, first + j_J, WIDTH // 2, i,
            RATIO, SPAN, SERIES, DIM, LENGTH, WIDTH,
        )  # fmt: skip
        most_even = tl.maximum(most_even, tl.max(tl.where(exists_J[:, None], even, float("-inf")), 0))
        most_odd = tl.maximum(most_odd, tl.max(tl.where(exists_J[:, None], odd, float("-inf")), 0))
    sum_even = tl.zeros([BLOCK_I], tl.float32)
    sum_odd, total_even, total_odd = sum_even, sum_even, sum_even
    for first in range(0, SPAN, BLOCK_J):
        even, odd, exists_J = _pairs_of_span(
            given_ptr, ring_ptr, token, position, start, slot, first + j_J, WIDTH // 2, i,
            RATIO, SPAN, SERIES, DIM, LENGTH, WIDTH,
        )  # fmt: skip
        even = tl.where(exists_J[:, None], tl.exp(even - most_even[None, :]), 0.0)
        odd = tl.where(exists_J[:, None], tl.exp(odd - most_odd[None, :]), 0.0)
        value_even, value_odd, _ = _pairs_of_span(
            given_ptr, ring_ptr, token, position, start, slot, first + j_J, 0, i,
            RATIO, SPAN, SERIES, DIM, LENGTH, WIDTH,
        )  # fmt: skip
        sum_even += tl.sum(even * value_even, 0)
        sum_odd += tl.sum(odd * value_odd, 0)
        total_even += tl.sum(even, 0)
        total_odd += tl.sum(odd, 0)
    mask = 2 * i < DIM
    made_even = tl.where(mask, sum_even / total_even, 0.0)
    made_odd = tl.where(mask, sum_odd / total_odd, 0.0)
    square = tl.sum(made_even * made_even + made_odd * made_odd, 0)
    inverse = tl.rsqrt(square + tl.load(eps_ptr).to(tl.float32))
    made_even *= inverse * tl.load(norm_ptr + 2 * i, mask=mask, other=0.0).to(tl.float32)
    made_odd *= inverse * tl.load(norm_ptr + 2 * i + 1, mask=mask, other=0.0).to(tl.float32)
    FIRST_PAIR: tl.constexpr = DIM // 2 - PAIRS
    cos, sin = load_turn(
        cos_ptr, sin_ptr, stride_turns, first_cos, first_sin, token.to(tl.int64), i, FIRST_PAIR, PAIRS
    )
    pair = i - FIRST_PAIR
    is_turned = (pair >= 0) & (pair < PAIRS)
    fixed_cos = tl.load(fixed_cos_ptr + pair, mask=is_turned, other=1.0).to(tl.float32)
    fixed_sin = tl.load(fixed_sin_ptr + pair, mask=is_turned, other=0.0).to(tl.float32)
    cos, sin = cos * fixed_cos + sin * fixed_sin, sin * fixed_cos - cos * fixed_sin
    page = tl.load(pages_ptr + row * stride_pages + position // PAGE_SIZE).to(tl.int64)
    entry_ptr = entries_ptr + (page * PER_PAGE + position % PAGE_SIZE // RATIO) * DIM
    even, odd = made_even * cos - made_odd * sin, made_odd * cos + made_even * sin
    tl.store(entry_ptr + 2 * i, even.to(entries_ptr.dtype.element_ty), mask=mask)
    tl.store(entry_ptr + 2 * i + 1, odd.to(entries_ptr.dtype.element_ty), mask=mask)


def keep(given: Tensor, ring: Tensor, step: TritonStep) -> None:
    """Stores the latest tokens of each row in its slot's ring."""
    assert given.is_contiguous() and ring.is_contiguous()
    length, width = ring.shape[1:]
    keep_kernel[len(given), triton.cdiv(width, BLOCK)](
        given, ring, step.table_R6, step.row_N, step.position_N, LENGTH=length, WIDTH=width, BLOCK=BLOCK,
        num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip


class TritonCompressor:
    """A compressor whose sums are made in float32."""

    name = "triton"

    def __init__(self, weights: CompressorWeights) -> None:
        self.weights = w = weights
        self._bias = w.bias_JX.float().contiguous()
        turn = fixed_turn(w.ratio - 1, w.inv_freq_F)
        self._fixed = tuple(part[0].float().contiguous() for part in turn)
        self._widths = {
            "RATIO": w.ratio,
            "SPAN": w.span,
            "SERIES": w.num_series,
            "DIM": w.dim,
            "PAIRS": w.rope.num_pairs,
            "BLOCK_J": min(16, triton.next_power_of_2(w.span)),
            "BLOCK_I": max(16, triton.next_power_of_2(w.dim // 2)),
        }

    def __call__(
        self, given: Tensor, ring: Tensor, entries: Tensor, angles: Angles, step: PreparedStep
    ) -> None:
        """Writes the entries that end in this step, and the tokens into the ring."""
        assert isinstance(step, TritonStep) and entries.is_contiguous()
        w, (length, width) = self.weights, ring.shape[1:]
        biased = torch.empty(len(given), width, dtype=ring.dtype, device=ring.device)
        biased_kernel[len(given), triton.cdiv(width, BLOCK)](
            given.contiguous(), self._bias, step.position_N, biased, RATIO=w.ratio, WIDTH=width, BLOCK=BLOCK,
            num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip
        make_kernel[(len(given),)](
            biased, ring, entries, w.norm.weight, w.norm.eps, *self._fixed, step.table_R6, step.row_N,
            step.position_N, step.pages_RP, step.pages_RP.stride(0), **turn_args(angles, w.rope), **self._widths,
            LENGTH=length, WIDTH=width, PAGE_SIZE=step.page_size, PER_PAGE=entries.shape[1], num_warps=4,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
        keep(biased, ring, step)
