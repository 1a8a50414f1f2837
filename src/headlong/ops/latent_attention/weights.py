"""The weights of a latent attention core, whoever computes it."""

from dataclasses import dataclass

from torch import Tensor

from headlong.ops.norm.reference import RmsNorm


@dataclass(frozen=True)
class LatentSizes:
    """What a core is besides its matrices. A token's queries are, head by head, [plain | rotary]; what becomes its
    latents is [latent | rotary]."""

    num_heads: int
    rank: int
    """The numbers of a latent."""
    plain_dim: int
    """How many numbers of a query are not rotated."""
    rope_dim: int
    value_dim: int
    scale: float
    """What scores are multiplied with before their softmax."""
    interleaved: bool
    """Whether the two numbers of a rotary pair are neighbours; else they lie in two halves."""


@dataclass(frozen=True)
class LatentAttentionWeights:
    """The weights of one layer's core."""

    sizes: LatentSizes
    norm: RmsNorm
    """The norm of the latent alone."""
    keys_HRP: Tensor
    """What turns the plain part of a head's query into one that latents are compared with: [heads, rank, plain]."""
    values_HVR: Tensor
    """What turns a sum of latents into a head's output: [heads, values, rank]."""
