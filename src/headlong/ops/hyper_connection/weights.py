"""The weights of hyper-connections: what leads from several residual streams into a block, and back.

Shape letters: S streams, D hidden size, M mixes: S for what goes in, S for what comes back, S · S between streams.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StreamSizes:
    """What all hyper-connections of a model have in common."""

    num_streams: int
    hidden_size: int
    eps: float
    """What is added to weights, and to sums before they divide."""
    norm_eps: float
    """The eps of the norm of all streams together."""
    iterations: int
    """How often rows and columns of the streams' own mixing are brought to sum up to 1."""


@dataclass(frozen=True)
class HyperWeights:
    """The weights of one block's connections, in float32 or wider."""

    sizes: StreamSizes
    fn_MX: Tensor
    """[M, S · D]; of a collapse, which only goes in, M is S."""
    base_M: Tensor
    scale_3: Tensor
    """One factor for each of the three kinds of mixes; of a collapse, one in all."""
