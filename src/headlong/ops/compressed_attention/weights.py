"""The weights of an attention over a window of tokens and compressed entries of what came before."""

from dataclasses import dataclass

from torch import Tensor

from headlong.ops.norm.reference import RmsNorm
from headlong.ops.rope.pairs import PairRope


@dataclass(frozen=True)
class CompressedAttentionWeights:
    """One head of keys serves all heads of queries, and its keys are its values."""

    num_heads: int
    head_dim: int
    window: int
    """How many tokens a token attends to, itself among them."""
    ratio: int
    """How many tokens there are to an entry; 0 where there are no entries."""
    query_eps: float
    """The eps of the norm of each head's query, which has no weights."""
    norm: RmsNorm
    """The norm of the key."""
    sinks_H: Tensor
    """A score for each head that counts in its softmax and has no value."""
    rope: PairRope
    on_pages: bool
    """Whether keys lie on pages, position by position; else each slot has a ring of them."""

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5
