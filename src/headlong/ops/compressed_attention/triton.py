# pyright: reportCallIssue=false, reportArgumentType=false
"""An attention over a window, compressed entries and a sink on a GPU, in four kernels: prepare queries and keys, attend
by splits of each token's own keys, combine, keep the keys."""

import torch
import triton
from torch import Tensor

from headlong.ops.compressed_attention.triton_kernels import (
    attend_kernel,
    combine_kernel,
    page_kernel,
    prepare_kernel,
)
from headlong.ops.compressed_attention.weights import CompressedAttentionWeights
from headlong.ops.compressor.triton import keep
from headlong.ops.gated_attention.triton import MAX_PARTS
from headlong.ops.linear.triton_weight import shared_memory
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles
from headlong.ops.rope.triton_pairs import turn_args
from headlong.ops.triton_launch import LAUNCH_OPTIONS
from headlong.ops.triton_step import TritonStep

SPLIT, KEYS, HEADS = 64, 32, 16
"""The keys of a split (SPLIT), those that are attended to at a time (BLOCK_P), and the heads of a tile (BLOCK_H)."""
FEW_KEYS, MANY_KEYS_TAKE = 16, 113 << 10
"""The keys at a time where a program has less shared memory than so many take: those of rings are float32."""


class TritonCompressedAttention:
    """The core of one layer. Keys are multiplied in the window's dtype or that of the result, whichever is narrower,
    into float32: rings are float32 whatever the model computes in."""

    name = "triton"

    def __init__(self, weights: CompressedAttentionWeights, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is that of the result."""
        self.weights = w = weights
        self.dtype = dtype
        self._sinks = w.sinks_H.float()
        self._block_i = max(16, triton.next_power_of_2(w.head_dim // 2))
        self._block_d = max(16, triton.next_power_of_2(w.head_dim))

    def __call__(
        self,
        queries: Tensor,
        given: Tensor,
        window: Tensor,
        entries: Tensor | None,
        chosen_NK: Tensor | None,
        angles: Angles,
        step: PreparedStep,
    ) -> Tensor:
        """Returns [N, heads · head_dim], the rotary part of each head turned back, and writes the tokens' keys."""
        assert isinstance(step, TritonStep)
        w, count = self.weights, len(queries)
        keys = self._empty_keys(count, window)
        prepared = keys.new_empty(count, w.num_heads, w.head_dim)
        self._prepare(queries, given, prepared, keys, angles, first_head=0)
        out = torch.empty(count, w.num_heads, w.head_dim, dtype=self.dtype, device=window.device)
        num_entries = step.longest // w.ratio if w.ratio and entries is not None else 0
        num_chosen = num_entries if chosen_NK is None else chosen_NK.shape[1]
        block_p = KEYS if shared_memory(window.device) >= MANY_KEYS_TAKE else FEW_KEYS
        num_splits = triton.cdiv(w.window, SPLIT) + triton.cdiv(num_chosen, SPLIT)
        most = max(1, MAX_PARTS // (num_splits * w.num_heads * w.head_dim))
        for first in range(0, count, most):
            tokens = min(most, count - first)
            shape = (tokens, w.num_heads, num_splits)
            maxima, totals, sums = (
                torch.empty(size, dtype=torch.float32, device=window.device)
                for size in (shape, shape, (*shape, w.head_dim))
            )
            attend_kernel[tokens, triton.cdiv(w.num_heads, HEADS), num_splits](
                prepared, keys, window, entries, chosen_NK, maxima, totals, sums, step.table_R6, step.row_N,
                step.position_N, step.pages_RP, step.pages_RP.stride(0), first, num_chosen, num_splits,
                HEADS=w.num_heads, DIM=w.head_dim, WINDOW=w.window, LENGTH=window.shape[1], WIDTH=window.shape[2],
                ON_PAGES=w.on_pages, RATIO=w.ratio if num_entries else 0, PAGE_SIZE=step.page_size,
                PER_PAGE=1 if entries is None else entries.shape[1], SPLIT=SPLIT, BLOCK_H=HEADS, BLOCK_P=block_p,
                BLOCK_D=self._block_d, num_warps=8, num_stages=2 if keys.element_size() < 4 else 1, **LAUNCH_OPTIONS,
            )  # fmt: skip
            combine_kernel[tokens, w.num_heads](
                maxima, totals, sums, self._sinks, out, step.position_N, first, num_chosen, num_splits,
                **turn_args(angles, w.rope), HEADS=w.num_heads, DIM=w.head_dim, PAIRS=w.rope.num_pairs,
                WINDOW=w.window, RATIO=w.ratio if num_entries else 0, SPLIT=SPLIT, BLOCK_I=self._block_i,
                num_warps=4, **LAUNCH_OPTIONS,
            )  # fmt: skip
        self._keep(keys, window, step)
        return out.flatten(1)

    def write(self, given: Tensor, window: Tensor, angles: Angles, step: PreparedStep) -> None:
        """Writes the tokens' keys, and computes nothing else."""
        assert isinstance(step, TritonStep)
        keys = self._empty_keys(len(given), window)
        self._prepare(given, given, keys, keys, angles, self.weights.num_heads)
        self._keep(keys, window, step)

    def _empty_keys(self, count: int, window: Tensor) -> Tensor:
        """Room for keys as they are multiplied, and kept: those of this step have the bits of those that are found."""
        dtype = min(window.dtype, self.dtype, key=lambda dtype: dtype.itemsize)
        return torch.empty(count, self.weights.head_dim, dtype=dtype, device=window.device)

    def _prepare(
        self, queries: Tensor, given: Tensor, prepared: Tensor, keys: Tensor, angles: Angles, first_head: int
    ) -> None:
        """Norms and turns the heads from `first_head` on, and the keys."""
        w = self.weights
        prepare_kernel[len(given), w.num_heads + 1 - first_head](
            queries.contiguous(), given.contiguous(), prepared, keys, w.norm.weight, w.norm.eps, w.query_eps, w.scale,
            first_head, **turn_args(angles, w.rope), HEADS=w.num_heads, DIM=w.head_dim, PAIRS=w.rope.num_pairs,
            NORMED=True, BLOCK_I=self._block_i, num_warps=1, **LAUNCH_OPTIONS,
        )  # fmt: skip

    def _keep(self, keys: Tensor, window: Tensor, step: TritonStep) -> None:
        if not self.weights.on_pages:
            keep(keys, window, step)
            return
        page_kernel[(len(keys),)](
            keys, window, step.row_N, step.position_N, step.pages_RP, step.pages_RP.stride(0),
            DIM=self.weights.head_dim, WIDTH=window.shape[2], PAGE_SIZE=step.page_size,
            BLOCK_D=triton.next_power_of_2(window.shape[2]), num_warps=1, **LAUNCH_OPTIONS,
        )  # fmt: skip
