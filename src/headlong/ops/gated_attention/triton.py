# pyright: reportCallIssue=false
"""The attention core on a GPU: prepare, then either attend by splits of the context and combine, or walk.

The keys of one row are read by many programs, each of them a split at fixed positions: short ones where a context
begins, twice as long with every `SPLITS_PER_SIZE`, so that both short and long contexts fill the device. Where there
are tokens enough to fill it, a program walks all splits instead, in their order: what is left of each need not go
through memory, and more queries share what is read. Both give a token the same bits.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from headlong.ops.gated_attention.reference import GatedAttentionWeights
from headlong.ops.gated_attention.triton_alike import walks_alike
from headlong.ops.gated_attention.triton_kernels import attend_kernel, combine_kernel, prepare_kernel
from headlong.ops.gated_attention.triton_walk import walk_kernel
from headlong.ops.linear.linear import Projected
from headlong.ops.linear.triton_projection import parts_of
from headlong.ops.linear.triton_split_k import WHOLE_SUMS, PartialSums
from headlong.ops.linear.triton_weight import multiprocessors_of
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles
from headlong.ops.triton_launch import HAS_WGMMA, LAUNCH_OPTIONS
from headlong.ops.triton_step import TritonStep
from headlong.types import Rows

FIRST_SPLIT, SPLITS_PER_SIZE = 128, 64
"""The positions of the shortest splits, a multiple of `POSITIONS`; and how many splits there are of each size."""
QUERIES = 32
"""The queries of a tile (BLOCK_M), or as many as one token has for one key head."""
WALKING_QUERIES, WALKED_COLUMNS, WIDEST_HEAD = 128, 128, 256
"""The queries of a tile that walks (BLOCK_M), the columns of a head that it sums (BLOCK_E), for whose two sums there
are registers; and the widest head for whose queries there is memory."""
WALKED_TOKENS = 16
"""The tokens that a step's rows must have on average for them to be walked."""
POSITIONS = 64
"""The positions of the context that are attended to at a time (BLOCK_P), in 16 bits; of float32, half as many."""
BLOCK_R = 128
"""The rows of a step that are searched at a time for the one that a tile belongs to."""
COMBINED_SPLITS, COMBINED_DIM = 16, 64
"""The most splits that are loaded at a time (BLOCK_S), and the columns of a head that a program adds (BLOCK_D)."""
MAX_PARTS = 1 << 26
"""The most numbers that splits may leave to be combined; longer prompts are attended to in several passes."""


class TritonGatedAttention:
    """The attention core of one layer. A 16-bit cache is multiplied in its own dtype, into float32; all else is
    float32."""

    name = "triton"

    def __init__(self, weights: GatedAttentionWeights, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is that of the result."""
        self.weights = w = weights
        self.dtype = dtype
        self.group = w.num_heads // w.num_kv_heads
        first_gate = (w.num_heads + w.num_kv_heads) * w.head_dim
        self.gates = slice(first_gate, first_gate + w.gated * w.num_heads * w.head_dim)
        self.sinks_H = None if w.sinks_H is None else w.sinks_H.float().contiguous()
        self.heads = {"HEADS": w.num_heads, "KV_HEADS": w.num_kv_heads, "HEAD_DIM": w.head_dim}

    @staticmethod
    def prepare(rows: Rows, pages_RP: Tensor, page_size: int) -> TritonStep:
        return TritonStep.of(rows, pages_RP, page_size)

    def __call__(
        self, given: Projected, keys: Tensor, values: Tensor, angles: Angles, step: PreparedStep
    ) -> Tensor:
        """Returns [N, heads · head_dim], and writes the tokens' keys and values into their pages."""
        assert isinstance(step, TritonStep)
        w, num_tokens, projection = self.weights, len(step.row_N), parts_of(given, self.gates)
        queries = keys.new_empty(num_tokens, w.num_heads, w.head_dim)
        self._prepare(projection.partial_sums(), queries, keys, values, angles, step, first_head=0)
        out, gates = keys.new_empty(num_tokens, w.num_heads * w.head_dim, dtype=self.dtype), None
        if self._may_walk(step, keys):
            gates = projection.gates(inputs_ready=False)
            if walks_alike(self, keys, gates):
                self.walk(queries, keys, values, gates, out, step)
                return out
        self.split(queries, keys, values, gates or projection.gates, out, step)
        return out

    def write(
        self, given: Projected, keys: Tensor, values: Tensor, angles: Angles, step: PreparedStep
    ) -> None:
        """Writes the tokens' keys and values into their pages, and attends to nothing."""
        assert isinstance(step, TritonStep)
        sums, first_head = parts_of(given, self.gates).partial_sums(), self.weights.num_heads
        self._prepare(sums, keys, keys, values, angles, step, first_head)

    def _prepare(
        self,
        projected: PartialSums,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: Angles,
        step: TritonStep,
        first_head: int,
    ) -> None:
        """Prepares the heads from `first_head` on, queries before keys; `queries` are not touched if these are keys
        alone."""
        w, norm = self.weights, self.weights.qk_norm
        assert keys.is_contiguous() and values.is_contiguous() and step.pages_RP.stride(1) == 1
        assert angles.cos.is_contiguous() and angles.sin.is_contiguous()
        grid = (len(step.row_N), w.num_heads + w.num_kv_heads - first_head)
        prepare_kernel[grid](
            projected.partials_PNO, queries, keys, values, angles.cos, angles.sin,
            None if norm is None else norm.weight, None if norm is None else norm.eps,
            step.row_N, step.position_N, step.pages_RP, first_head, step.pages_RP.stride(0),
            w.query_scale, angles.rotary_dim, **projected.args, **self.heads, **_cache_shape(keys),
            NORMED=norm is not None, num_warps=1, **LAUNCH_OPTIONS,
        )  # fmt: skip

    def _may_walk(self, step: TritonStep, keys: Tensor) -> bool:
        """Whether so many programs would walk that they fill the device, for rows that bring more than some drafts."""
        w, num_tokens = self.weights, len(step.row_N)
        fits = keys.element_size() == 2 and w.head_dim <= WIDEST_HEAD and self.group <= WALKING_QUERIES
        if not HAS_WGMMA or not fits or num_tokens < WALKED_TOKENS * len(step.table_R6):
            return False
        columns = triton.cdiv(w.head_dim, WALKED_COLUMNS)
        programs = num_tokens // (WALKING_QUERIES // self.group) * w.num_kv_heads * columns
        return programs >= multiprocessors_of(keys.device)

    def walk(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        gates: PartialSums | None,
        out: Tensor,
        step: TritonStep,
    ) -> None:
        """Attends to each token's whole context at once."""
        w, num_rows, num_tokens = self.weights, step.table_R6.shape[0], len(step.row_N)
        tokens, shape = WALKING_QUERIES // self.group, _cache_shape(keys)
        columns = min(shape["BLOCK_D"], WALKED_COLUMNS)
        tiles = (num_tokens + num_rows * (tokens - 1)) // tokens
        walk_kernel[tiles, w.num_kv_heads, triton.cdiv(w.head_dim, columns)](
            queries, keys, values, None if gates is None else gates.partials_PNO, out, step.table_R6, step.pages_RP,
            step.pages_RP.stride(0), num_rows, **(WHOLE_SUMS if gates is None else gates.args), all_tokens=num_tokens,
            **self.heads, **shape, FIRST_SPLIT=FIRST_SPLIT, SPLITS_PER_SIZE=SPLITS_PER_SIZE, BLOCK_R=BLOCK_R,
            TILE_TOKENS=tokens, BLOCK_M=WALKING_QUERIES, BLOCK_P=_positions(keys), BLOCK_E=columns, WINDOW=w.window,
            sinks_ptr=self.sinks_H, num_warps=8, num_stages=3, **LAUNCH_OPTIONS,
        )  # fmt: skip

    def split(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        gates: PartialSums | Callable[[], PartialSums | None] | None,
        out: Tensor,
        step: TritonStep,
    ) -> None:
        """Attends to splits of each token's context, and combines them. Gates may be asked for in between, when that
        is launched which takes its time."""
        w, num_tokens, num_splits = (
            self.weights,
            len(step.row_N),
            splits_seen(self.weights.window, step.longest),
        )
        most = max(1, MAX_PARTS // (num_splits * w.num_heads * w.head_dim))
        for first in range(0, num_tokens, most):
            count = min(most, num_tokens - first)
            parts = self._attend(queries, keys, values, step, first, count, num_splits)
            gates = gates() if callable(gates) else gates
            self._combine(*parts, gates, out, step, first)

    def _attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        step: TritonStep,
        first: int,
        count: int,
        num_splits: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attends: computes what each split of the context contributes to each query of tokens first…first + count −
        1."""
        w, num_rows = self.weights, step.table_R6.shape[0]
        shape = (count, w.num_heads, num_splits)
        maxima, totals, sums = (
            torch.empty(size, dtype=torch.float32, device=keys.device)
            for size in (shape, shape, (*shape, w.head_dim))
        )
        block_m = max(QUERIES, triton.next_power_of_2(self.group))
        tokens = block_m // self.group
        programs = num_splits if w.window is None else splits_seen(w.window + tokens - 1, step.longest)
        attend_kernel[((count + num_rows * (tokens - 1)) // tokens, w.num_kv_heads, programs)](
            queries, keys, values, maxima, totals, sums, step.table_R6, step.pages_RP, step.pages_RP.stride(0), first,
            count, num_rows, num_splits, **self.heads, **_cache_shape(keys), FIRST_SPLIT=FIRST_SPLIT,
            SPLITS_PER_SIZE=SPLITS_PER_SIZE, BLOCK_R=BLOCK_R, TILE_TOKENS=tokens, BLOCK_M=block_m,
            BLOCK_P=_positions(keys), WINDOW=w.window, num_warps=4, num_stages=2, **LAUNCH_OPTIONS,
        )  # fmt: skip
        return maxima, totals, sums

    def _combine(
        self,
        maxima: Tensor,
        totals: Tensor,
        sums: Tensor,
        gates: PartialSums | None,
        out: Tensor,
        step: TritonStep,
        first: int,
    ) -> None:
        """Combines the splits of tokens from `first` on, with their gates, into `out`."""
        w, (count, _, num_splits) = self.weights, maxima.shape
        combine_kernel[(count, w.num_heads, triton.cdiv(w.head_dim, COMBINED_DIM))](
            maxima, totals, sums, None if gates is None else gates.partials_PNO, out, step.position_N, first,
            num_splits, **(WHOLE_SUMS if gates is None else gates.args), HEADS=w.num_heads, HEAD_DIM=w.head_dim,
            FIRST_SPLIT=FIRST_SPLIT, SPLITS_PER_SIZE=SPLITS_PER_SIZE, BLOCK_S=combined_at_once(num_splits),
            BLOCK_D=COMBINED_DIM, WINDOW=w.window, sinks_ptr=self.sinks_H, num_warps=1, **LAUNCH_OPTIONS,
        )  # fmt: skip


def split_of(position: int) -> int:
    """The inverse of the kernels' `split_start`."""
    at = position // FIRST_SPLIT + SPLITS_PER_SIZE
    doublings = (at // SPLITS_PER_SIZE).bit_length() - 1
    return doublings * SPLITS_PER_SIZE + (at >> doublings) - SPLITS_PER_SIZE


def splits_seen(window: int | None, longest: int) -> int:
    """The most splits that so many positions, one after the other, may touch in a context of so many."""
    every = split_of(longest - 1) + 1
    return every if window is None else min((window + FIRST_SPLIT - 2) // FIRST_SPLIT + 1, every)


def combined_at_once(num_splits: int) -> int:
    """The splits that are loaded at a time (BLOCK_S)."""
    return min(COMBINED_SPLITS, triton.next_power_of_2(num_splits))


def _positions(keys: Tensor) -> int:
    return POSITIONS * 2 // max(2, keys.element_size())


def _cache_shape(keys: Tensor) -> dict[str, int]:
    page_size, width = keys.shape[2:]
    return {"PAGE_SIZE": page_size, "WIDTH": width, "BLOCK_D": max(16, triton.next_power_of_2(width))}
