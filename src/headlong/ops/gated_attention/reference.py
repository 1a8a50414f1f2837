"""What lies between an attention layer's two projections: norms, rotation, paged attention, output gate."""

from dataclasses import dataclass

from torch import Tensor

from headlong.ops.elementwise import sigmoid
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.paged_attention import reference as paged_attention
from headlong.ops.paged_attention.reference import AttentionPlan
from headlong.ops.rope.reference import Angles, rotate
from headlong.types import Rows


@dataclass(frozen=True)
class GatedAttentionWeights:
    """A projected token is [queries, keys | gates | values]; the softmax scale rides on the queries' norm."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: RmsNorm
    """One weight per query and key head."""


class ReferenceGatedAttention:
    """Plain torch; the truth."""

    name = "reference"

    def __init__(self, weights: GatedAttentionWeights) -> None:
        self.weights = w = weights
        heads, kv, dim = w.num_heads, w.num_kv_heads, w.head_dim
        self.sizes = [(heads + kv) * dim, heads * dim, kv * dim]

    @staticmethod
    def plan(rows: Rows, pages_RP: Tensor, page_size: int) -> AttentionPlan:
        return paged_attention.plan(rows, pages_RP, page_size)

    def __call__(
        self, projected: Tensor, keys: Tensor, values: Tensor, angles: Angles, plan: AttentionPlan
    ) -> Tensor:
        """[N, heads · head_dim]; writes the tokens' keys and values into their pages."""
        w, num_tokens = self.weights, projected.shape[0]
        qk, gate, v = projected.split_with_sizes(self.sizes, dim=-1)
        qk = rotate(w.qk_norm(qk.view(num_tokens, -1, w.head_dim)), angles)
        paged_attention.write(keys, qk[:, w.num_heads :], plan)
        paged_attention.write(values, v.reshape(num_tokens, -1, w.head_dim), plan)
        out = paged_attention.attend(qk[:, : w.num_heads], keys, values, plan)
        return out.flatten(1) * sigmoid(gate)
