"""Hyper-connections in plain torch. Every sum over streams is written out, so that a token's bits are its own.

    f = fn · norm(all streams side by side)                      a token's mixes, three kinds of them
    pre = sigmoid(f_pre · scale_0 + base_pre) + eps              what of each stream goes into the block
    post = 2 · sigmoid(f_post · scale_1 + base_post)             what of the block's output each stream gets
    comb = doubly_stochastic(softmax(f_comb · scale_2 + base))   what of each stream each stream keeps

The block is given sum_k pre_k · x_k; afterwards x_j becomes post_j · out + sum_k comb_kj · x_k.
"""

import torch
from torch import Tensor

from headlong.ops.elementwise import sigmoid
from headlong.ops.hyper_connection.weights import HyperWeights, StreamSizes
from headlong.ops.interfaces import Mix
from headlong.ops.linear.linear import Linear
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.ordered_sum import sum_in_order


class ReferenceHyperConnection:
    """The connections of one block, which other backends are tested against."""

    name = "reference"

    def __init__(self, weights: HyperWeights, fn: Linear) -> None:
        """`fn` multiplies by the weights' `fn_MX`."""
        self.sizes, self._fn = weights.sizes, fn
        self._norm = joint_norm(weights)
        scale = weights.scale_3.to(weights.base_M.dtype)
        count = self.sizes.num_streams
        self._scale_M = torch.cat(
            [scale[0].expand(count), scale[1].expand(count), scale[2].expand(count * count)]
        )
        self._base_M = weights.base_M

    def __call__(self, x_NSD: Tensor, then: Norm) -> tuple[Normed, Mix]:
        """Returns what the block is given, after the norm `then`, and what `add` needs."""
        pre_NS, post_NS, comb_NSS = self.mixes(_mixes(x_NSD, self._norm, self._fn))
        return then(_collapsed(x_NSD, pre_NS)), Mix(post_NS, comb_NSS)

    def mixes(self, raw_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what of each stream goes in, what each gets back, and what of each goes on in each, by a token's
        products with `fn`."""
        s = self.sizes
        mixes_NM = raw_NM * self._scale_M + self._base_M
        pre, post, comb = mixes_NM.split((s.num_streams, s.num_streams, s.num_streams**2), dim=-1)
        comb_NSS = doubly_stochastic(comb.unflatten(-1, (s.num_streams, -1)), s)
        return sigmoid(pre.contiguous()) + s.eps, sigmoid(post.contiguous()) * 2.0, comb_NSS

    def add(self, x_NSD: Tensor, out_ND: Tensor, mix: Mix) -> Tensor:
        """Returns the streams after the block."""
        total = mix.post_NS[..., None] * out_ND[:, None]
        for stream in range(self.sizes.num_streams):
            total = total + mix.comb_NSS[:, stream, :, None] * x_NSD[:, stream, None]
        return total


class ReferenceCollapse:
    """The end of the streams: one hidden state of them all."""

    name = "reference"

    def __init__(self, weights: HyperWeights, fn: Linear) -> None:
        self.sizes, self._fn = weights.sizes, fn
        self._norm = joint_norm(weights)
        self._scale, self._base_S = weights.scale_3, weights.base_M

    def __call__(self, x_NSD: Tensor) -> Tensor:
        mixes_NS = _mixes(x_NSD, self._norm, self._fn) * self._scale + self._base_S
        return _collapsed(x_NSD, sigmoid(mixes_NS) + self.sizes.eps)


def doubly_stochastic(comb_NSS: Tensor, sizes: StreamSizes) -> Tensor:
    """Brings rows and columns to sum up to nearly 1, starting from a softmax of each row. Streams come first meanwhile:
    then sums over them are sums of whole tensors."""
    comb = comb_NSS.permute(1, 2, 0).contiguous()  # [from, to, N]
    comb = (comb - comb.amax(1, keepdim=True)).exp()
    comb = comb / sum_in_order(comb, 1)[:, None] + sizes.eps
    comb = comb / (sum_in_order(comb, 0) + sizes.eps)
    for _ in range(sizes.iterations - 1):
        comb = comb / (sum_in_order(comb, 1) + sizes.eps)[:, None]
        comb = comb / (sum_in_order(comb, 0) + sizes.eps)
    return comb.permute(2, 0, 1).contiguous()


def joint_norm(weights: HyperWeights) -> RmsNorm:
    """The norm of all streams side by side, which has no weights."""
    return RmsNorm(torch.ones_like(weights.fn_MX[0]), weights.sizes.norm_eps)


def _mixes(x_NSD: Tensor, norm: RmsNorm, fn: Linear) -> Tensor:
    return fn(norm(x_NSD.flatten(1)))


def _collapsed(x_NSD: Tensor, weights_NS: Tensor) -> Tensor:
    return sum_in_order(weights_NS[..., None] * x_NSD, 1)
