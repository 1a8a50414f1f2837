# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The DeltaNet core on a GPU in float32, three kernels a layer: what tokens bring, the delta rule, the norm.

A row's tokens run one after the other in a single loop, whether replayed, certain or drafted: the same
instructions give the same bits however a row was cut into steps. What a program overwrites, no other program
of its launch reads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.delta_net.reference import QK_EPS, DeltaNetWeights
from headlong.ops.gated_delta.reference import DeltaState
from headlong.ops.triton_launch import OPTIONS, follow
from headlong.ops.triton_step import TritonStep

BLOCK_E = 16
"""Columns of S that a program holds: 64 bytes side by side, of keys of 128 in 64 registers a lane."""


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log1p from log: what 1 + u rounds away is put back by the quotient."""
    u = tl.exp(x)
    sum_ = 1.0 + u
    log1p = tl.where(sum_ == 1.0, u, tl.log(sum_) * (u / (sum_ - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def _row(table, row):
    """slot, certain tokens, drafts, drafts to replay, first token"""
    at = table + row * 6
    drafts = tl.load(at + 3)
    first = tl.load(at + 5).to(tl.int64)
    return tl.load(at).to(tl.int64), tl.load(at + 2) - drafts, drafts, tl.load(at + 4), first


@triton.jit
def _line(past, new, place, channel, mask, C, WIDTH, PAST):
    """What the convolution sees at a place of a row: its window first, then the tokens of this step."""
    is_past = place < PAST
    old = tl.load(past + place * C + channel, mask=mask & is_past, other=0.0)
    fed = tl.load(new + (place - PAST) * WIDTH + channel, mask=mask & (place >= PAST), other=0.0)
    return tl.where(is_past, old, fed)


@triton.jit
def _convolved(past, new, conv, t, channel, mask, C, WIDTH, TAPS: tl.constexpr):
    """Channels of a row's token t."""
    total = tl.zeros(channel.shape, tl.float32)
    place = t + tl.zeros(channel.shape, tl.int64)
    for tap in tl.static_range(TAPS):
        x = _line(past, new, place + tap, channel, mask, C, WIDTH, TAPS - 1)
        weight = tl.load(conv + tap * C + channel, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(x, weight, total)
    return _silu(total)


@triton.jit
def _normalised(x, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit(do_not_specialize_on_alignment=["projected"])
def _bring(
    projected, windows, conv, rate, dt_bias, table, row_of, inputs,
    QK_EPS: tl.constexpr, KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TAPS: tl.constexpr, WINDOW: tl.constexpr, TILED: tl.constexpr, POW_D: tl.constexpr, POW_E: tl.constexpr,
):  # fmt: skip
    """For a token and a value head: k, v, decay, β as drafts are kept, then q."""
    follow()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    WIDTH: tl.constexpr = C + H * E + 2 * H
    slot, _, _, replay, first = _row(table, tl.load(row_of + token))
    past, new = windows + (slot * WINDOW + replay) * C, projected + first * WIDTH
    t = token - first
    key_head = head % KEY_HEADS if TILED else head // (H // KEY_HEADS)
    d, e = tl.arange(0, POW_D), tl.arange(0, POW_E)
    in_d, in_e = d < D, e < E
    q_at, k_at, v_at = key_head * D + d, (KEY_HEADS + key_head) * D + d, 2 * KEY_HEADS * D + head * E + e
    q = _convolved(past, new, conv, t, q_at, in_d, C, WIDTH, TAPS)
    k = _convolved(past, new, conv, t, k_at, in_d, C, WIDTH, TAPS)
    v = _convolved(past, new, conv, t, v_at, in_e, C, WIDTH, TAPS)
    gates = projected + token * WIDTH + C + H * E + head
    beta = 1.0 / (1.0 + tl.exp(-tl.load(gates)))
    a = tl.load(gates + H) + tl.load(dt_bias + head).to(tl.float32)
    decay = tl.exp(tl.load(rate + head).to(tl.float32) * _softplus(a))
    to = inputs + (token * H + head) * (2 * D + E + 2)
    tl.store(to + d, _normalised(k, QK_EPS), mask=in_d)
    tl.store(to + D + e, v, mask=in_e)
    tl.store(to + D + E, decay)
    tl.store(to + D + E + 1, beta)
    tl.store(to + D + E + 2 + d, _normalised(q, QK_EPS), mask=in_d)


@triton.jit
def _keep_window(window, new, certain, drafts, replay, channel, C, WIDTH, PAST, POW_W: tl.constexpr):
    """The inputs before the drafts, and theirs. It moves onto itself, so all is read before any is kept."""
    place = tl.arange(0, POW_W)[:, None].to(tl.int64)
    channel = channel[None, :]
    mask = (place < PAST + drafts) & (channel < C)
    kept = _line(window + replay * C, new, certain + place, channel, mask, C, WIDTH, PAST)
    tl.debug_barrier()
    tl.store(window + place * C + channel, kept, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["projected"])
def _delta_rule(
    projected, windows, inputs, memory, drafts, table, out,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, MAX_DRAFTS: tl.constexpr, POW_D: tl.constexpr, POW_W: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A row's tokens on a few columns of a value head's S; and its share of the row's window."""
    follow()
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    WIDTH: tl.constexpr = C + H * E + 2 * H
    X: tl.constexpr = D + E + 2
    slot, certain, num_drafts, replay, first = _row(table, row)
    channel = (head * tl.num_programs(0) + block) * BLOCK_C + tl.arange(0, BLOCK_C)
    window, new = windows + slot * WINDOW * C, projected + first * WIDTH
    _keep_window(window, new, certain, num_drafts, replay, channel, C, WIDTH, TAPS - 1, POW_W)
    d, e = tl.arange(0, POW_D), block * BLOCK_E + tl.arange(0, BLOCK_E)
    in_d, in_e = d < D, e < E
    in_S = in_d[:, None] & in_e[None, :]
    S_at = memory + ((slot * H + head) * D + d[:, None]) * E + e[None, :]
    S = tl.load(S_at, mask=in_S, other=0.0)
    for i in range(replay + certain + num_drafts):
        token = first + i - replay
        replays = i < replay
        num_read = tl.where(replays, 0, 1)
        x = tl.where(
            replays,
            drafts + ((slot * MAX_DRAFTS + i) * H + head) * X,
            inputs + (token * H + head) * (X + D),
        )
        k = tl.load(x + d, mask=in_d, other=0.0)
        v = tl.load(x + D + e, mask=in_e, other=0.0)
        q = tl.load(x + X + d, mask=d < D * num_read, other=0.0)
        S = S * tl.load(x + D + E)
        change = (v - tl.sum(k[:, None] * S, 0)) * tl.load(x + D + E + 1)
        S = tl.fma(k[:, None], change[None, :], S)
        tl.store(out + (token * H + head) * E + e, tl.sum(q[:, None] * S, 0), mask=e < E * num_read)
        if i + 1 == replay + certain:
            tl.store(S_at, S, mask=in_S)


@triton.jit(do_not_specialize_on_alignment=["projected"])
def _finish(
    projected, inputs, drafts, norm, table, row_of, found, out, eps,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MAX_DRAFTS: tl.constexpr,
    POW_E: tl.constexpr, POW_X: tl.constexpr,
):  # fmt: skip
    """For a token and a value head: the gated norm; and its draft, now that none is replayed."""
    follow()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    X: tl.constexpr = D + E + 2
    slot, certain, _, _, first = _row(table, tl.load(row_of + token))
    draft = token - first - certain
    x = tl.arange(0, POW_X)
    kept = x < tl.where(draft >= 0, X, 0)
    tl.store(
        drafts + ((slot * MAX_DRAFTS + draft) * H + head) * X + x,
        tl.load(inputs + (token * H + head) * (X + D) + x, mask=kept, other=0.0),
        mask=kept,
    )
    e = tl.arange(0, POW_E)
    at = (token * H + head) * E + e
    gate_at = projected + token * (C + H * E + 2 * H) + C + head * E + e
    normed = _normalised(tl.load(found + at, mask=e < E, other=0.0), eps)
    weight = tl.load(norm + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(out + at, normed * weight * _silu(tl.load(gate_at, mask=e < E, other=0.0)), mask=e < E)


class TritonDeltaNet:
    """One layer's weights. Every program is one warp: sums stay among its lanes."""

    name = "triton"

    def __init__(self, weights: DeltaNetWeights, dtype: torch.dtype = torch.float32) -> None:
        """What comes out is of this dtype."""
        self.weights = w = weights
        self.dtype = dtype
        self.eps = float(w.norm.eps)
        self.sizes = {"KEY_HEADS": w.num_key_heads, "H": w.num_value_heads, "D": w.key_dim, "E": w.value_dim}
        self.pow_d, self.pow_e = triton.next_power_of_2(w.key_dim), triton.next_power_of_2(w.value_dim)
        self.block_e = min(BLOCK_E, self.pow_e)

    def __call__(self, projected: Tensor, delta: DeltaState, windows_SWC: Tensor, plan: TritonStep) -> Tensor:
        """[N, value heads · value dim]; updates the plan's slots."""
        assert projected.is_contiguous() and projected.dtype == torch.float32
        w, num_tokens, (num_rows, _) = self.weights, projected.shape[0], plan.table_R6.shape
        heads, size = w.num_value_heads, w.key_dim + w.value_dim + 2
        inputs_NHY = projected.new_empty(num_tokens, heads, size + w.key_dim)
        found = projected.new_empty(num_tokens, heads * w.value_dim)
        out = torch.empty_like(found, dtype=self.dtype)
        taps, window, max_drafts = w.conv_TC.shape[0], windows_SWC.shape[1], delta.drafts_SKHX.shape[1]
        _bring[(num_tokens, heads)](
            projected, windows_SWC, w.conv_TC, w.rate, w.dt_bias, plan.table_R6, plan.row_N, inputs_NHY,
            QK_EPS=QK_EPS, TAPS=taps, WINDOW=window, TILED=w.tiled, POW_D=self.pow_d, POW_E=self.pow_e,
            **self.sizes, num_warps=1, **OPTIONS,
        )  # fmt: skip
        blocks = triton.cdiv(w.value_dim, self.block_e)
        _delta_rule[(blocks, heads, num_rows)](
            projected, windows_SWC, inputs_NHY, delta.committed_SHDE, delta.drafts_SKHX, plan.table_R6, found,
            TAPS=taps, WINDOW=window, MAX_DRAFTS=max_drafts, POW_D=self.pow_d,
            POW_W=triton.next_power_of_2(window), BLOCK_E=self.block_e,
            BLOCK_C=triton.next_power_of_2(triton.cdiv(w.conv_channels, blocks * heads)),
            **self.sizes, num_warps=1, **OPTIONS,
        )  # fmt: skip
        _finish[(num_tokens, heads)](
            projected, inputs_NHY, delta.drafts_SKHX, w.norm.weight, plan.table_R6, plan.row_N, found, out, self.eps,
            MAX_DRAFTS=max_drafts, POW_E=self.pow_e, POW_X=triton.next_power_of_2(size),
            **self.sizes, num_warps=1, **OPTIONS,
        )  # fmt: skip
        return out
