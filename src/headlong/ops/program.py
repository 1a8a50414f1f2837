"""A layer stack as data: the instructions that layers write down once, for a backend to compile into one call.

What flows from instruction to instruction lies in a few buffers of float32 [tokens, …]: the residual stream, two that
take turns, and what the caller brings and gets. Knows the ops' interfaces, no backend and no names of models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from headlong.ops import interfaces
from headlong.ops.linear.linear import Projection
from headlong.ops.norm import normed
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles


class Buffer(IntEnum):
    """The buffers between instructions, numbered as in csrc/program.c."""

    STREAM = 0
    """The residual stream, which the caller brings; it is written over."""
    FIRST = 1
    SECOND = 2
    RESULT = 3
    GIVEN = 4
    """A second input that the caller brings; it is only read."""
    THIRD = 5
    """Takes turns with FIRST and SECOND where a layer needs one more."""


STREAM, FIRST, SECOND, RESULT, GIVEN, THIRD = Buffer


@dataclass(frozen=True)
class Norm:
    """A norm. The result goes into lines of `stride` numbers from `column` on; a stride of 0 stands for lines that hold
    nothing else."""

    norm: normed.Norm
    source: Buffer
    to: Buffer
    column: int = 0
    stride: int = 0


@dataclass(frozen=True)
class Gemm:
    """A GEMM. With `add` the result is added to what is in the buffer. `only` are the outputs [first, last) that are
    wanted; without it all are."""

    linear: Projection
    source: Buffer
    to: Buffer
    add: bool = False
    only: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class SiluMul:
    """The gate of an MLP: silu(gate) · up of two times `size` numbers."""

    source: Buffer
    to: Buffer
    size: int


@dataclass(frozen=True)
class DeltaNet:
    """The DeltaNet core. `layer` is the name by which its state is found."""

    core: interfaces.DeltaNet
    layer: str
    source: Buffer
    to: Buffer


@dataclass(frozen=True)
class Attention:
    """The attention core. `layer` is the name by which its state is found. Without `to`, only keys and values are
    written."""

    core: interfaces.GatedAttention
    layer: str
    source: Buffer
    to: Buffer | None


@dataclass(frozen=True)
class LatentAttention:
    """The core of a latent attention layer. `layer` is the name by which its state is found; `queries` and `given` are
    what the core takes. Without `queries` and `to`, only latents are written."""

    core: interfaces.LatentAttention
    layer: str
    queries: Buffer | None
    given: Buffer
    to: Buffer | None


@dataclass(frozen=True)
class Experts:
    """A layer's experts, added to what is in the buffer `to`; `logits` is the buffer of the router's outputs."""

    experts: interfaces.Experts
    source: Buffer
    logits: Buffer
    to: Buffer


Instruction = Norm | Gemm | SiluMul | DeltaNet | Attention | LatentAttention | Experts


class CompiledProgram(Protocol):
    """A list of instructions compiled into one call."""

    def __call__(
        self,
        stream_ND: Tensor,
        step: PreparedStep,
        angles: Angles,
        states: Mapping[str, object],
        given_ND: Tensor | None = None,
    ) -> Tensor:
        """Runs the instructions. Returns what was left in RESULT, or [N, 0] if nothing was. `states` are the layers'
        own, by name."""
        ...
