"""What the ops of a layer look like to layers, whichever backend made them.

Shape letters: N tokens, D hidden size, R router logits. Knows no backend and no model.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from headlong.ops.gated_delta.reference import DeltaState
from headlong.ops.linear.linear import Linear, Projected, Shard
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles
from headlong.quant.format import Weight


class KvPages(Protocol):
    """The state of an attention layer: keys and values, [pages, heads, page_size, head_dim padded] each."""

    @property
    def keys(self) -> Tensor: ...

    @property
    def values(self) -> Tensor: ...


class LatentPages(Protocol):
    """The state of a latent attention layer: latents [pages, page_size, width padded]."""

    @property
    def latents(self) -> Tensor: ...


class DeltaNetMemory(Protocol):
    """The state of a DeltaNet layer: its recurrent memory and its convolution windows [slots, window, channels]."""

    @property
    def delta(self) -> DeltaState: ...

    @property
    def windows(self) -> Tensor: ...


class GatedAttention(Protocol):
    """The attention core: what lies between an attention layer's two projections."""

    name: str

    def __call__(
        self, projected: Projected, keys: Tensor, values: Tensor, angles: Angles, step: PreparedStep, /
    ) -> Tensor:
        """Returns [N, heads · head_dim], and writes the tokens' keys and values into their pages."""
        ...

    def write(
        self, projected: Projected, keys: Tensor, values: Tensor, angles: Angles, step: PreparedStep, /
    ) -> None:
        """Writes the tokens' keys and values, and computes nothing else."""
        ...


class LatentAttention(Protocol):
    """The core of a latent attention layer: what lies between its queries and latents and its last projection."""

    name: str

    def __call__(
        self, queries: Tensor, given: Tensor, latents: Tensor, angles: Angles, step: PreparedStep, /
    ) -> Tensor:
        """Returns [N, heads · values], and writes the tokens' latents into their pages. `queries` are [N, heads ·
        (plain + rotary)], `given` is what becomes latents, [N, rank + rotary]."""
        ...

    def write(self, given: Tensor, latents: Tensor, angles: Angles, step: PreparedStep, /) -> None:
        """Writes the tokens' latents, and computes nothing else."""
        ...


class DeltaNet(Protocol):
    """The DeltaNet core: what lies between a DeltaNet layer's two projections."""

    name: str

    def __call__(
        self, projected: Projected, delta: DeltaState, windows_SWC: Tensor, step: PreparedStep, /
    ) -> Tensor:
        """Returns [N, value heads · value_dim], and updates the state in the step's slots."""
        ...


class Experts(Protocol):
    """The routing and the routed experts of a layer."""

    name: str
    has_shared: bool
    """Whether the shared expert, to which every token is routed, is computed here too, if there is one."""

    def __call__(
        self, given: Normed, logits_NR: Tensor, shared_ND: Tensor | None, residual_ND: Tensor, then: Norm, /
    ) -> tuple[Tensor, Normed]:
        """Adds the experts' outputs to `residual_ND`, and applies `then`. `logits_NR` are the router's, and after
        them the shared expert's gate, if it has one; `shared_ND` is what that expert gives, where it is not computed
        here."""
        ...


class Embedding(Protocol):
    """Turns tokens into vectors. Split by output, each device has the rows of some tokens."""

    shard: Shard

    @property
    def asks_host(self) -> bool:
        """Whether the host has to know which rows are wanted."""
        ...

    def __call__(self, tokens_N: Tensor, /) -> Tensor: ...

    def lm_head(self, make: Callable[[Weight], Linear]) -> Linear:
        """Returns the lm_head that shares this weight; `make` builds it where the weight is not held as a linear
        already."""
        ...
