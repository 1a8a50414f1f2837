"""The weights of a latent attention core, whoever computes it."""

from dataclasses import dataclass

from torch import Tensor

from headlong.ops.norm.reference import RmsNorm


@dataclass(frozen=True)
class LatentAttentionWeights:
    """The weights of one layer's core. A token's queries are, head by head, [plain | rotary]; its latents are [latent |
    rotary]."""

    scale: float
    """What scores are multiplied with before their softmax."""
    interleaved: bool
    """Whether the two numbers of a rotary pair are neighbours; else they lie in two halves."""
    norm: RmsNorm
    """The norm of the latent alone."""
    keys_HRP: Tensor
    """What turns the plain part of a head's query into one that latents are compared with: [heads, rank, plain]."""
    values_HVR: Tensor
    """What turns a sum of latents into a head's output: [heads, values, rank]."""
    rope_dim: int

    @property
    def num_heads(self) -> int:
        return self.keys_HRP.shape[0]

    @property
    def rank(self) -> int:
        return self.keys_HRP.shape[1]

    @property
    def plain_dim(self) -> int:
        """How many numbers of a query are not rotated."""
        return self.keys_HRP.shape[2]

    @property
    def value_dim(self) -> int:
        return self.values_HVR.shape[1]
