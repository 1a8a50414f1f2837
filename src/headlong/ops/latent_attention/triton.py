# pyright: reportCallIssue=false
"""The latent attention core on a GPU, in five kernels: rotate and write latents, bring queries to them, attend by
splits of the context, combine, bring sums of latents to values. Splits are those of the attention core."""

import torch
import triton
from torch import Tensor

from headlong.ops.gated_attention.triton import (
    BLOCK_R,
    COMBINED_DIM,
    COMBINED_SPLITS,
    FIRST_SPLIT,
    MAX_PARTS,
    SPLITS_PER_SIZE,
    split_of,
)
from headlong.ops.gated_attention.triton_kernels import combine_kernel
from headlong.ops.latent_attention.triton_kernels import attend_kernel, heads_kernel, rotate_kernel
from headlong.ops.latent_attention.weights import LatentAttentionWeights
from headlong.ops.linear.triton_split_k import WHOLE_SUMS
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles
from headlong.ops.triton_launch import LAUNCH_OPTIONS
from headlong.ops.triton_step import TritonStep

QUERIES, POSITIONS = 32, 32
"""The queries of a tile (BLOCK_M), heads of tokens one after the other, and the positions that are attended to at a
time (BLOCK_P)."""
TOKENS, OUTS, INS = 16, 64, 64
"""A tile of the products of each head."""


class TritonLatentAttention:
    """The core of one layer. Latents are multiplied in the cache's dtype, heads' own matrices in `dtype`, both into
    float32."""

    name = "triton"

    def __init__(self, weights: LatentAttentionWeights, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is that of the result, and of heads' own matrices."""
        w = self.sizes = weights.sizes
        self.norm = weights.norm
        self.dtype = dtype
        self.keys_HRP, self.values_HVR = weights.keys_HRP.to(dtype), weights.values_HVR.to(dtype)
        self.widths = {
            "HEADS": w.num_heads,
            "RANK": w.rank,
            "ROPE": w.rope_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(w.rank)),
            "BLOCK_E": max(16, triton.next_power_of_2(w.rope_dim)),
        }

    def __call__(
        self, queries: Tensor, given: Tensor, latents: Tensor, angles: Angles, step: PreparedStep
    ) -> Tensor:
        """Returns [N, heads · values], and writes the tokens' latents into their pages."""
        assert isinstance(step, TritonStep)
        w, num_tokens = self.sizes, queries.shape[0]
        absorbed = latents.new_empty(num_tokens, w.num_heads, w.rank + w.rope_dim)
        self._rotate(queries, given, absorbed, latents, angles, step, first_head=0)
        projected = queries.view(num_tokens, w.num_heads, w.plain_dim + w.rope_dim)
        self._each_head(projected, self.keys_HRP, absorbed, w.scale)
        summed = torch.empty(num_tokens, w.num_heads, w.rank, dtype=self.dtype, device=latents.device)
        num_splits = split_of(step.longest - 1) + 1
        most = max(1, MAX_PARTS // (num_splits * w.num_heads * w.rank))
        for first in range(0, num_tokens, most):
            self._attend(absorbed, latents, summed, step, first, min(most, num_tokens - first), num_splits)
        out = summed.new_empty(num_tokens, w.num_heads, w.value_dim)
        self._each_head(summed, self.values_HVR, out, 1.0)
        return out.flatten(1)

    def write(self, given: Tensor, latents: Tensor, angles: Angles, step: PreparedStep) -> None:
        """Writes the tokens' latents into their pages, and computes nothing else."""
        assert isinstance(step, TritonStep)
        self._rotate(given, given, latents, latents, angles, step, self.sizes.num_heads)

    def _rotate(
        self,
        queries: Tensor,
        given: Tensor,
        absorbed: Tensor,
        latents: Tensor,
        angles: Angles,
        step: TritonStep,
        first_head: int,
    ) -> None:
        """Rotates the heads from `first_head` on and writes latents; `queries` and `absorbed` are not touched if there
        are no heads."""
        w = self.sizes
        assert latents.is_contiguous() and given.is_contiguous() and queries.is_contiguous()
        assert angles.cos.is_contiguous() and angles.sin.is_contiguous() and step.pages_RP.stride(1) == 1
        rotate_kernel[len(step.row_N), w.num_heads + 1 - first_head](
            queries, given, absorbed, latents, angles.cos, angles.sin, self.norm.weight, self.norm.eps, step.row_N,
            step.position_N, step.pages_RP, first_head, step.pages_RP.stride(0), w.scale, PLAIN=w.plain_dim,
            INTERLEAVED=w.interleaved, **self.widths, **_cache_shape(latents), num_warps=1, **LAUNCH_OPTIONS,
        )  # fmt: skip

    def _each_head(self, x_NHX: Tensor, weights_HOI: Tensor, out_NHY: Tensor, scale: float) -> None:
        """Multiplies the first numbers of each head by its own matrix, into the first numbers of a head of the
        result."""
        num_tokens, heads, width = x_NHX.shape
        num_outs, num_ins = weights_HOI.shape[1:]
        stride_h, stride_o, stride_i = weights_HOI.stride()
        heads_kernel[triton.cdiv(num_tokens, TOKENS), heads, triton.cdiv(num_outs, OUTS)](
            x_NHX, weights_HOI, out_NHY, num_tokens, scale, HEADS=heads, NUM_INS=num_ins, NUM_OUTS=num_outs,
            STRIDE_X=width, STRIDE_OUT=out_NHY.shape[2], STRIDE_H=stride_h, STRIDE_O=stride_o, STRIDE_I=stride_i,
            BLOCK_M=TOKENS, BLOCK_O=OUTS, BLOCK_I=INS, num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip

    def _attend(
        self,
        absorbed: Tensor,
        latents: Tensor,
        summed: Tensor,
        step: TritonStep,
        first: int,
        count: int,
        num_splits: int,
    ) -> None:
        """Attends with the queries of tokens first…first + count − 1, and combines the splits into `summed`."""
        w, num_rows, device = self.sizes, step.table_R6.shape[0], latents.device
        shape = (count, w.num_heads, num_splits)
        maxima, totals, sums = (
            torch.empty(size, dtype=torch.float32, device=device) for size in (shape, shape, (*shape, w.rank))
        )
        num_tiles = (count * w.num_heads + num_rows * (QUERIES - 1)) // QUERIES
        attend_kernel[num_tiles, num_splits](
            absorbed, latents, maxima, totals, sums, step.table_R6, step.pages_RP, step.pages_RP.stride(0), first,
            count, num_rows, num_splits, **self.widths, **_cache_shape(latents), FIRST_SPLIT=FIRST_SPLIT,
            SPLITS_PER_SIZE=SPLITS_PER_SIZE, BLOCK_R=BLOCK_R, BLOCK_M=QUERIES, BLOCK_P=POSITIONS, num_warps=8,
            num_stages=2, **LAUNCH_OPTIONS,
        )  # fmt: skip
        combine_kernel[count, w.num_heads, triton.cdiv(w.rank, COMBINED_DIM)](
            maxima, totals, sums, None, summed, step.position_N, first, num_splits, **WHOLE_SUMS, HEADS=w.num_heads,
            HEAD_DIM=w.rank, FIRST_SPLIT=FIRST_SPLIT, SPLITS_PER_SIZE=SPLITS_PER_SIZE, BLOCK_S=COMBINED_SPLITS,
            BLOCK_D=COMBINED_DIM, num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip


def _cache_shape(latents: Tensor) -> dict[str, int]:
    page_size, width = latents.shape[1:]
    return {"PAGE_SIZE": page_size, "WIDTH": width}
