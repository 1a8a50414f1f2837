"""What lies between an attention layer's two projections: norms, rotation, paged attention, output gate.

Norms and gate are left out where a family has none.
"""

from dataclasses import dataclass

from torch import Tensor

from headlong.ops.elementwise import sigmoid
from headlong.ops.linear.linear import Projected
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.paged_attention import reference as paged_attention
from headlong.ops.paged_attention.reference import PreparedAttention
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles, rotate
from headlong.types import Rows


@dataclass(frozen=True)
class GatedAttentionWeights:
    """The weights of one layer's core. A projected token is [queries, keys | gates | values], without the gates where
    `gated` is false."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: RmsNorm | None
    """One norm weight per query and key head, the queries' with the softmax scale in it; None if heads are not
    normed."""
    gated: bool = True
    window: int | None = None
    """How many positions a token attends to, its own the last of them; None for all up to its own."""
    sinks_H: Tensor | None = None
    """A score of each head that takes part in the softmax and has no value; None where there are none."""

    @property
    def query_scale(self) -> float:
        """The part of the softmax scale that the queries' norm does not hold."""
        return self.head_dim**-0.5 if self.qk_norm is None else 1.0


class ReferenceGatedAttention:
    """The attention core in plain torch, which other backends are tested against."""

    name = "reference"

    def __init__(self, weights: GatedAttentionWeights) -> None:
        self.weights = w = weights
        heads, kv, dim = w.num_heads, w.num_kv_heads, w.head_dim
        self.sizes = [(heads + kv) * dim, heads * dim if w.gated else 0, kv * dim]

    @staticmethod
    def prepare(rows: Rows, pages_RP: Tensor, page_size: int) -> PreparedAttention:
        return paged_attention.prepare(rows, pages_RP, page_size)

    def __call__(
        self, projected: Projected, keys: Tensor, values: Tensor, angles: Angles, step: PreparedStep
    ) -> Tensor:
        """Returns [N, heads · head_dim], and writes the tokens' keys and values into their pages."""
        assert isinstance(step, PreparedAttention)
        queries, gate = self._write(projected, keys, values, angles, step)
        w = self.weights
        out = paged_attention.attend(queries, keys, values, step, w.window, w.sinks_H).flatten(1)
        return out * sigmoid(gate) if w.gated else out

    def write(
        self, projected: Projected, keys: Tensor, values: Tensor, angles: Angles, step: PreparedStep
    ) -> None:
        """Writes the tokens' keys and values, and attends to nothing."""
        assert isinstance(step, PreparedAttention)
        self._write(projected, keys, values, angles, step)

    def _write(
        self, projected: Projected, keys: Tensor, values: Tensor, angles: Angles, step: PreparedAttention
    ) -> tuple[Tensor, Tensor]:
        """Writes the tokens' keys and values; returns queries and gates."""
        assert isinstance(projected, Tensor)
        w, num_tokens = self.weights, projected.shape[0]
        qk, gate, v = projected.split_with_sizes(self.sizes, dim=-1)
        qk = qk.view(num_tokens, -1, w.head_dim)
        qk = rotate(qk if w.qk_norm is None else w.qk_norm(qk), angles)
        queries = qk[:, : w.num_heads]
        if w.qk_norm is None:
            queries = queries * w.query_scale
        paged_attention.write(keys, qk[:, w.num_heads :], step)
        paged_attention.write(values, v.reshape(num_tokens, -1, w.head_dim), step)
        return queries, gate
