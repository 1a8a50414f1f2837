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
from headlong.ops.linear.triton_weight import multiprocessors_of
from headlong.ops.prepared import PreparedStep
from headlong.ops.triton_launch import LAUNCH_OPTIONS
from headlong.ops.triton_step import TritonStep

LANES = 8
"""Lanes that hold a column of S between them. Their number is part of the order in which sums are made."""
COLUMNS, FEWER_COLUMNS = 16, 8
"""Columns of S that a program holds, which is one warp, and those of prompts where that gives no scheduler two warps.
The columns of one key dimension are 64 bytes of memory, and with keys of 128 they take 64 registers of a lane."""
MANY_OF_A_ROW, AT_ONCE = 32, 4
"""The fewest tokens of a row for which a turn of the delta rule's loop takes several, and how many."""
TOKENS, INPUT_WARPS = 8, 4
"""Tokens of a program that finds what tokens bring, and its warps."""
HEADS = 4
"""Value heads of a program of the gated norm, a warp for each."""
FEW_OF_A_ROW, FEW_TOKENS = 2, 64
"""The most tokens of a row, and of a step, for which every program of the delta rule computes for itself what its
tokens bring: that is one launch fewer, though all programs of a head compute the same."""


class TritonDeltaNet:
    """The DeltaNet core of one layer. The delta rule's and the norm's sums stay among the lanes of a warp."""

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
        self.schedulers = 4 * multiprocessors_of(w.rate.device)
        self.value_size = (w.value_dim + 2 + 3) // 4 * 4
        self.gates = slice(w.conv_channels, w.conv_channels + w.num_value_heads * w.value_dim)

    def tile(self, most_tokens: int, num_rows: int) -> dict[str, int]:
        """Returns how the delta rule's programs are cut, which changes no order of its sums."""
        w, columns, at_once = self.weights, min(COLUMNS, self.pow_e), 1
        if most_tokens >= MANY_OF_A_ROW:
            at_once = AT_ONCE
            whole = w.key_dim % 32 == 0 and w.value_dim % COLUMNS == 0
            if whole and num_rows * w.num_value_heads * w.value_dim <= FEWER_COLUMNS * self.schedulers:
                columns = FEWER_COLUMNS
        lanes = min(LANES, self.pow_d)
        neighbours = max(1, columns * lanes // 32)
        return {"LANES": lanes, "COLUMNS": columns, "NEIGHBOURS": neighbours, "AT_ONCE": at_once}

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
        keys_NGZ = projected.new_empty(num_tokens, w.num_key_heads, 2 * w.key_dim)
        values_NHV = projected.new_empty(num_tokens, heads, self.value_size)
        assert max(keys_NGZ.numel(), values_NHV.numel()) < 1 << 31, "the delta rule's loop counts in int32"
        found = projected.new_empty(num_tokens, heads * w.value_dim)
        out = torch.empty_like(found, dtype=self.dtype)
        window, max_drafts = windows_SWC.shape[1], delta.drafts_SKHX.shape[1]
        common = {
            **self.sizes,
            "V": self.value_size,
            "TAPS": w.conv_TC.shape[0],
            "WINDOW": window,
            **LAUNCH_OPTIONS,
        }
        few = step.most_tokens <= FEW_OF_A_ROW and num_tokens <= FEW_TOKENS
        conv_TC = self.wide_conv_TC if few else w.conv_TC
        sources = (projected, windows_SWC, conv_TC, w.rate, w.dt_bias)
        keys = {"QK_EPS": QK_EPS, "POW_D": self.pow_d}
        if not few:
            kernels.token_inputs_kernel[(triton.cdiv(num_tokens, TOKENS), w.num_key_heads + heads)](
                *sources, step.table_R6, step.row_N, keys_NGZ, values_NHV, num_tokens, POW_E=self.pow_e, TOKENS=TOKENS,
                num_warps=INPUT_WARPS, **keys, **common,
            )  # fmt: skip
        tile = self.tile(step.most_tokens, num_rows)
        kernels.delta_rule_kernel[(triton.cdiv(w.value_dim, tile["COLUMNS"]), heads, num_rows)](
            *sources, keys_NGZ, values_NHV, delta.committed_SHDE, delta.drafts_SKHX, step.table_R6, found,
            FIND_INPUTS=few, MAX_DRAFTS=max_drafts, TILED=w.tiled, num_warps=1, **tile, **keys, **common,
        )  # fmt: skip
        gates, parts, groups = projection.gates(), max(1, max_drafts), triton.cdiv(heads, HEADS)
        assert gates is not None
        kernels.gated_norm_kernel[(num_tokens + num_rows * parts, groups)](
            projected, windows_SWC, keys_NGZ, values_NHV, delta.drafts_SKHX, w.norm.weight, step.table_R6, found,
            gates.partials_PNO, out, self.eps, **gates.args, MAX_DRAFTS=max_drafts, TILED=w.tiled, PARTS=parts,
            HEADS=HEADS, POW_E=self.pow_e, POW_X=triton.next_power_of_2(size), POW_W=triton.next_power_of_2(window),
            BLOCK_C=triton.next_power_of_2(triton.cdiv(w.conv_channels, parts * groups)), num_warps=HEADS, **common,
        )  # fmt: skip
        return out
