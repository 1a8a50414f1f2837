# pyright: reportArgumentType=false, reportCallIssue=false
"""The DeltaNet core on a GPU in float32: two kernels a layer for few tokens, three for many, and the same bits."""

import torch
import triton
from torch import Tensor

from headlong.ops.delta_net import triton_kernels as kernels
from headlong.ops.delta_net.reference import QK_EPS, DeltaNetWeights
from headlong.ops.gated_delta.reference import DeltaState
from headlong.ops.linear.linear import Projected
from headlong.ops.linear.triton_projection import parts_of
from headlong.ops.prepared import PreparedStep
from headlong.ops.triton_launch import LAUNCH_OPTIONS
from headlong.ops.triton_step import TritonStep

BLOCK_E = 16
"""Columns of S that a program holds. The columns of one key dimension are 64 bytes of memory, and with keys of 128 they
take 64 registers of a lane."""
FEW_OF_A_ROW, FEW_TOKENS = 2, 64
"""The most tokens of a row, and of a step, for which every program of the delta rule computes for itself what its
tokens bring: that is one launch fewer, though all programs of a head compute the same."""


class TritonDeltaNet:
    """The DeltaNet core of one layer. Every program is one warp, so that sums stay among its lanes."""

    name = "triton"

    def __init__(self, weights: DeltaNetWeights, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is that of the result."""
        self.weights = w = weights
        self.dtype = dtype
        self.eps = float(w.norm.eps)
        self.wide_conv_TC = w.conv_TC.float()
        """The convolution's weights in float32, for few tokens: programs would convert them while all else waits."""
        self.sizes = {"KEY_HEADS": w.num_key_heads, "H": w.num_value_heads, "D": w.key_dim, "E": w.value_dim}
        self.pow_d, self.pow_e = triton.next_power_of_2(w.key_dim), triton.next_power_of_2(w.value_dim)
        self.block_e = min(BLOCK_E, self.pow_e)
        self.gates = slice(w.conv_channels, w.conv_channels + w.num_value_heads * w.value_dim)

    def __call__(
        self, given: Projected, delta: DeltaState, windows_SWC: Tensor, step: PreparedStep
    ) -> Tensor:
        """Returns [N, value heads · value dim], and updates the slots of the step."""
        assert isinstance(step, TritonStep)
        projection = parts_of(given, self.gates)
        projected = projection.first()
        assert projected.is_contiguous() and projected.dtype == torch.float32
        w, num_tokens, (num_rows, _) = self.weights, projected.shape[0], step.table_R6.shape
        heads, size = w.num_value_heads, w.key_dim + w.value_dim + 2
        inputs_NHY = projected.new_empty(num_tokens, heads, size + w.key_dim)
        found = projected.new_empty(num_tokens, heads * w.value_dim)
        out = torch.empty_like(found, dtype=self.dtype)
        window, max_drafts = windows_SWC.shape[1], delta.drafts_SKHX.shape[1]
        common = {
            **self.sizes,
            "TAPS": w.conv_TC.shape[0],
            "WINDOW": window,
            "num_warps": 1,
            **LAUNCH_OPTIONS,
        }
        keys = {"QK_EPS": QK_EPS, "TILED": w.tiled, "POW_D": self.pow_d}
        few = step.most_tokens <= FEW_OF_A_ROW and num_tokens <= FEW_TOKENS
        conv_TC = self.wide_conv_TC if few else w.conv_TC
        sources = (projected, windows_SWC, conv_TC, w.rate, w.dt_bias)
        if not few:
            kernels.token_inputs_kernel[(num_tokens, heads)](
                *sources, step.table_R6, step.row_N, inputs_NHY, POW_E=self.pow_e, **keys, **common
            )
        kernels.delta_rule_kernel[(triton.cdiv(w.value_dim, self.block_e), heads, num_rows)](
            *sources, inputs_NHY, delta.committed_SHDE, delta.drafts_SKHX, step.table_R6, found,
            FIND_INPUTS=few, MAX_DRAFTS=max_drafts, BLOCK_E=self.block_e, **keys, **common,
        )  # fmt: skip
        gates, parts = projection.gates(), max(1, max_drafts)
        assert gates is not None
        kernels.gated_norm_kernel[(num_tokens + num_rows * parts, heads)](
            projected, windows_SWC, inputs_NHY, delta.drafts_SKHX, w.norm.weight, step.table_R6, found,
            gates.partials_PNO, out, self.eps, **gates.args, MAX_DRAFTS=max_drafts, PARTS=parts,
            POW_E=self.pow_e, POW_X=triton.next_power_of_2(size), POW_W=triton.next_power_of_2(window),
            BLOCK_C=triton.next_power_of_2(triton.cdiv(w.conv_channels, parts * heads)), **common,
        )  # fmt: skip
        return out
