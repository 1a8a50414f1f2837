"""The weights of an indexer, which says which entries a token attends to."""

from dataclasses import dataclass

from headlong.ops.rope.pairs import PairRope


@dataclass(frozen=True)
class IndexerSizes:
    """An indexer has no weights of its own: its queries and gates come from linears."""

    num_heads: int
    head_dim: int
    ratio: int
    """How many tokens there are to an entry."""
    top_k: int
    """The most entries that a token attends to."""
    rope: PairRope

    @property
    def scale(self) -> float:
        """What scores are multiplied with: the part of keys, then that of gates."""
        return self.head_dim**-0.5 * self.num_heads**-0.5
