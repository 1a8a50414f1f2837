"""What the ops of a layer look like to layers, whichever backend made them.

Shape letters: N tokens, D hidden size, R router logits. Knows no backend and no model.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

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


class CompressedAttention(Protocol):
    """The core of an attention over a window of tokens and compressed entries: what lies between its queries and keys
    and its last projections."""

    name: str

    def __call__(
        self,
        queries: Tensor,
        given: Tensor,
        window: Tensor,
        entries: Tensor | None,
        chosen_NK: Tensor | None,
        angles: Angles,
        step: PreparedStep,
        /,
    ) -> Tensor:
        """Returns [N, heads · head_dim], the rotary part of each head turned back, and writes the tokens' keys.

        `queries` are [N, heads · head_dim], `given` is what becomes keys [N, head_dim]. `window` are keys of earlier
        tokens: rings [slots, ring, head_dim] with position p at p % ring, or pages [pages, page_size, padded].
        `entries` are [pages, entries a page, head_dim]; the compressor has written those of this step. Without
        `chosen_NK` all that have ended by a token's position are attended to, else those listed, ascending, −1 after
        the last."""
        ...

    def write(self, given: Tensor, window: Tensor, angles: Angles, step: PreparedStep, /) -> None:
        """Writes the tokens' keys, and computes nothing else."""
        ...


class Compressor(Protocol):
    """Makes entries of tokens. Entry e ends with token (e + 1) · ratio − 1, at position q; it lies on the page of q, at
    place (q % page_size) // ratio."""

    name: str

    def __call__(
        self, given: Tensor, ring: Tensor, entries: Tensor, angles: Angles, step: PreparedStep, /
    ) -> None:
        """Writes the entries that end in this step, and the tokens into the ring.

        `given` are the tokens' values and gates [N, width]; `ring` [slots, ring, width] has those of earlier tokens,
        position p at p % ring, with the bias added to gates."""
        ...


class Indexer(Protocol):
    """Chooses the entries that each token attends to: those with the largest Σ_h gate_h · relu(query_h · entry), of
    equals the earlier ones."""

    name: str

    def __call__(
        self, queries: Tensor, gates_NH: Tensor, entries: Tensor, angles: Angles, step: PreparedStep, /
    ) -> Tensor:
        """Returns the numbers of entries [N, at most top_k], ascending, −1 after the last. `queries` are [N, heads ·
        head_dim]; `entries` [pages, entries a page, head_dim] are the indexer's own."""
        ...


class Mix(NamedTuple):
    """How a block's output comes back into the streams, and the streams into each other."""

    post_NS: Tensor
    comb_NSS: Tensor
    """How much of each stream, the second dimension, goes on in each, the third."""


class HyperConnection(Protocol):
    """What leads from several residual streams [N, streams, D] into a block, and from there back."""

    name: str

    def __call__(self, x_NSD: Tensor, then: Norm, /) -> tuple[Normed, Mix]:
        """Returns what the block is given, after the norm `then`, and what `add` needs."""
        ...

    def add(self, x_NSD: Tensor, out_ND: Tensor, mix: Mix, /) -> Tensor:
        """Returns the streams after the block, whose output is `out_ND`."""
        ...


class Collapse(Protocol):
    """The end of several residual streams: a weighted sum of them."""

    name: str

    def __call__(self, x_NSD: Tensor, /) -> Tensor: ...


class GroupedLinear(Protocol):
    """A linear whose matrix is block-diagonal: each group of outputs has a group of the inputs."""

    name: str
    shard: Shard

    def __call__(self, x_ND: Tensor, /) -> Tensor: ...


class Experts(Protocol):
    """The routing and the routed experts of a layer."""

    name: str
    has_shared: bool
    """Whether the shared expert, to which every token is routed, is computed here too, if there is one."""

    def __call__(
        self,
        given: Normed,
        logits_NR: Tensor,
        shared_ND: Tensor | None,
        residual_ND: Tensor,
        then: Norm,
        chosen_NA: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Normed]:
        """Adds the experts' outputs to `residual_ND`, and applies `then`. `logits_NR` are the router's, and after
        them the shared expert's gate, if it has one; `shared_ND` is what that expert gives, where it is not computed
        here. `chosen_NA` are each token's experts where its scores do not choose them; they weigh them all the
        same."""
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
