"""What lies between the projections of a latent attention layer (MLA), in its absorbed form.

A head's keys are W_k · latent beside a rotated part that all heads share, its values W_v · latent. Since q · (W_k c) =
(W_kᵀ q) · c, queries are brought to the latents instead of latents to keys, and W_v is applied to the weighted sum of
latents: attention with one key of rank + rotary numbers for all heads, whose first `rank` numbers are the value.
Latents are never expanded, and prompts are computed as single tokens are, which is what equal bits cost. README.md
beside this file says how much.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headlong.ops.batched_matmul import matmul
from headlong.ops.latent_attention.weights import LatentAttentionWeights
from headlong.ops.paged_attention import reference as paged_attention
from headlong.ops.paged_attention.reference import BLOCK, PreparedAttention
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles, rotate


class ReferenceLatentAttention:
    """The core in plain torch, which other backends are tested against."""

    name = "reference"

    def __init__(self, weights: LatentAttentionWeights, dtype: torch.dtype) -> None:
        """`dtype` is what heads' own matrices are multiplied in."""
        self.sizes, self.norm = weights.sizes, weights.norm
        self._into_keys_HPR = weights.keys_HRP.to(dtype).transpose(1, 2).contiguous()
        self._into_values_HRV = weights.values_HVR.to(dtype).transpose(1, 2).contiguous()

    def __call__(
        self, queries: Tensor, given: Tensor, latents: Tensor, angles: Angles, step: PreparedStep
    ) -> Tensor:
        """Returns [N, heads · values], and writes the tokens' latents into their pages."""
        self.write(given, latents, angles, step)
        assert isinstance(step, PreparedAttention)
        w, num_tokens = self.sizes, queries.shape[0]
        plain, rotary = queries.view(num_tokens, w.num_heads, -1).split((w.plain_dim, w.rope_dim), dim=-1)
        absorbed = _each_head(plain, self._into_keys_HPR)
        q_NHD = torch.cat([absorbed, rotate(self._halves(rotary), angles)], -1) * w.scale
        pages = latents[:, None]
        sums = paged_attention.attend(q_NHD, pages, pages, step)[..., : w.rank]
        return _each_head(sums, self._into_values_HRV).flatten(1)

    def write(self, given: Tensor, latents: Tensor, angles: Angles, step: PreparedStep) -> None:
        """Writes the tokens' latents, and computes nothing else."""
        assert isinstance(step, PreparedAttention)
        w = self.sizes
        latent, rotary = given.split((w.rank, w.rope_dim), dim=-1)
        rotated = rotate(self._halves(rotary)[:, None], angles)
        paged_attention.write(latents[:, None], torch.cat([self.norm(latent)[:, None], rotated], -1), step)

    def _halves(self, rotary: Tensor) -> Tensor:
        """Brings the two numbers of each pair into two halves."""
        if not self.sizes.interleaved:
            return rotary
        return rotary.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _each_head(x_NHI: Tensor, weights_HIO: Tensor) -> Tensor:
    """Multiplies each head by its own matrix, in products of one shape whatever the number of tokens. [N, H, O]"""
    num_tokens, dtype = len(x_NHI), x_NHI.dtype
    x_NHI = F.pad(x_NHI, (0, 0, 0, 0, 0, -num_tokens % BLOCK)).to(weights_HIO.dtype)
    blocks = [matmul(block.transpose(0, 1).contiguous(), weights_HIO) for block in x_NHI.split(BLOCK)]
    return torch.cat(blocks, 1).transpose(0, 1)[:num_tokens].to(dtype)
