# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false
"""Hyper-connections on a GPU: one kernel makes a token's mixes and what goes into the block, another brings it back.

The mixes of a token are few numbers, which every program that needs them computes for itself. Sums over streams are
written out in their order, and nothing depends on how many tokens there are.

Legend. N tokens, S streams (a power of two), D columns of which a program has BLOCK; M mixes: S for what goes in, S for
what comes back, S · S between streams.
  x_ptr, out_streams_ptr [N, S, D]; mixes_ptr [N, M], not yet scaled; scale_ptr, base_ptr: float32; given_ptr, out_ptr
  [N, D]; post_ptr [N, S]; comb_ptr [N, S, S].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.hyper_connection.reference import joint_norm
from headlong.ops.hyper_connection.weights import HyperWeights
from headlong.ops.interfaces import Mix
from headlong.ops.linear.linear import Linear
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.norm.triton import TritonRmsNorm
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

BLOCK = 1024
"""The columns of a program."""


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _one_of(x_S, s, which: tl.constexpr):
    """The number of one stream; all others are zeros, whatever they hold."""
    return tl.sum(tl.where(s == which, x_S, 0.0), 0)


@triton.jit(do_not_specialize=["hidden"])
def mix_kernel(
    x_ptr, mixes_ptr, scale_ptr, base_ptr, given_ptr, post_ptr, comb_ptr, hidden, eps,
    S: tl.constexpr, ITERATIONS: tl.constexpr, COLLAPSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums a token's streams, each by its weight; the first program of a token also stores how its block comes back,
    unless this COLLAPSES the streams for good."""
    launch_dependents_and_wait()
    token, s = tl.program_id(0).to(tl.int64), tl.arange(0, S)
    NUM_MIXES: tl.constexpr = S if COLLAPSES else (2 + S) * S
    mixes_ptr += token * NUM_MIXES
    pre_S = _sigmoid(tl.load(mixes_ptr + s) * tl.load(scale_ptr) + tl.load(base_ptr + s)) + eps
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_ptrs = x_ptr + token * S * hidden + d
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(S):
        x = tl.load(x_ptrs + stream * hidden, mask=d < hidden, other=0.0).to(tl.float32)
        total += _one_of(pre_S, s, stream) * x
    tl.store(given_ptr + token * hidden + d, total.to(given_ptr.dtype.element_ty), mask=d < hidden)
    if not COLLAPSES:  # noqa: SIM102 - the first is known when the kernel is compiled
        if tl.program_id(1) == 0:
            post_S = tl.load(mixes_ptr + S + s) * tl.load(scale_ptr + 1) + tl.load(base_ptr + S + s)
            tl.store(post_ptr + token * S + s, 2.0 * _sigmoid(post_S))
            place_SS = 2 * S + s[:, None] * S + s[None, :]
            comb_SS = tl.load(mixes_ptr + place_SS) * tl.load(scale_ptr + 2) + tl.load(base_ptr + place_SS)
            comb_SS = tl.exp(comb_SS - tl.max(comb_SS, 1)[:, None])
            comb_SS = comb_SS / tl.sum(comb_SS, 1)[:, None] + eps
            comb_SS = comb_SS / (tl.sum(comb_SS, 0) + eps)[None, :]
            for _ in range(ITERATIONS - 1):
                comb_SS = comb_SS / (tl.sum(comb_SS, 1) + eps)[:, None]
                comb_SS = comb_SS / (tl.sum(comb_SS, 0) + eps)[None, :]
            tl.store(comb_ptr + token * S * S + s[:, None] * S + s[None, :], comb_SS)


@triton.jit(do_not_specialize=["hidden"])
def add_kernel(
    x_ptr, out_ptr, post_ptr, comb_ptr, out_streams_ptr, hidden, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Brings a block's output back into a token's streams, and the streams into each other."""
    launch_dependents_and_wait()
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, first = d < hidden, token * S * hidden
    out = tl.load(out_ptr + token * hidden + d, mask=mask, other=0.0).to(tl.float32)
    for to in tl.static_range(S):
        total = tl.load(post_ptr + token * S + to) * out
        for stream in tl.static_range(S):
            x = tl.load(x_ptr + first + stream * hidden + d, mask=mask, other=0.0).to(tl.float32)
            total += tl.load(comb_ptr + token * S * S + stream * S + to) * x
        place = first + to * hidden + d
        tl.store(out_streams_ptr + place, total.to(out_streams_ptr.dtype.element_ty), mask=mask)


class TritonHyperConnection:
    """The connections of one block; of a collapse, what leads in alone."""

    name = "triton"

    def __init__(self, weights: HyperWeights, fn: Linear) -> None:
        self.sizes, self._fn = weights.sizes, fn
        self._norm = TritonRmsNorm(joint_norm(weights))
        self._scale, self._base = weights.scale_3.float(), weights.base_M.float()

    @staticmethod
    def supports(weights: HyperWeights) -> str | None:
        """Why these kernels cannot serve; None if they can."""
        count = weights.sizes.num_streams
        return f"{count} streams are no power of two" if count & (count - 1) else None

    def __call__(self, x_NSD: Tensor, then: Norm) -> tuple[Normed, Mix]:
        """Returns what the block is given, after the norm `then`, and what `add` needs."""
        count, streams, _ = x_NSD.shape
        post_NS = torch.empty(count, streams, dtype=torch.float32, device=x_NSD.device)
        comb_NSS = post_NS.new_empty(count, streams, streams)
        return then(self._mixed(x_NSD, post_NS, comb_NSS)), Mix(post_NS, comb_NSS)

    def add(self, x_NSD: Tensor, out_ND: Tensor, mix: Mix) -> Tensor:
        """Returns the streams after the block."""
        count, streams, hidden = x_NSD.shape
        after = torch.empty_like(x_NSD, memory_format=torch.contiguous_format)
        add_kernel[count, triton.cdiv(hidden, BLOCK)](
            x_NSD.contiguous(), out_ND.contiguous(), *mix, after, hidden, S=streams, BLOCK=BLOCK, num_warps=4,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
        return after

    def _mixed(self, x_NSD: Tensor, post: Tensor | None = None, comb: Tensor | None = None) -> Tensor:
        """The weighted sum of the streams; how it comes back is stored into `post` and `comb`."""
        count, streams, hidden = x_NSD.shape
        x_NSD = x_NSD.contiguous()  # at first one embedding for all
        mixes = self._fn(self._norm(x_NSD.view(count, -1))).float().contiguous()
        given = x_NSD.new_empty(count, hidden)
        mix_kernel[count, triton.cdiv(hidden, BLOCK)](
            x_NSD, mixes, self._scale, self._base, given, post, comb, hidden, self.sizes.eps, S=streams,
            ITERATIONS=self.sizes.iterations, COLLAPSES=post is None, BLOCK=BLOCK, num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip
        return given


class TritonCollapse(TritonHyperConnection):
    """The end of the streams: one hidden state of them all."""

    def __call__(self, x_NSD: Tensor) -> Tensor:  # type: ignore[override]
        return self._mixed(x_NSD)
