"""How layers ask for their tensors: a scope of names over a weight source, in the dtypes layers need."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headlong.checkpoint.load import WeightSource
from headlong.ops.linear.invariance import Linear
from headlong.ops.registry import Ops


@dataclass(frozen=True)
class Scope:
    """`scope("layers.0")` is the scope below; `linear` packs, `vector` is for small tensors, fp32 or wider."""

    source: WeightSource
    ops: Ops
    prefix: str = ""

    def __call__(self, name: str) -> "Scope":
        return Scope(self.source, self.ops, f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return self.source.has(self.prefix + name)

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.source.get(self.prefix + name, *shape)

    def vector(self, name: str, *shape: int) -> Tensor:
        return self.source.get(self.prefix + name, *shape, dtype=self.ops.activation_dtype)

    def norm_weight(self, name: str, size: int) -> Tensor:
        """A norm's multiplier: Qwen stores w where 1 + w is meant."""
        return self.vector(f"{name}.weight", size) + 1.0

    def norm(self, name: str, size: int, eps: float, *, wide: bool = False) -> Callable[[Tensor], Tensor]:
        return self.ops.norm(self.norm_weight(name, size), eps, wide=wide)

    def linear(self, name: str, out_features: int, in_features: int) -> Linear:
        return self.ops.linear(self.tensor(f"{name}.weight", out_features, in_features))

    def stacked(self, *parts: tuple[str, int], in_features: int) -> Tensor:
        """Several weights over the same input as one; `parts` are (name, out_features). Filled part by part, so
        that no more than one part is held twice."""
        whole, first = None, 0
        for name, size in parts:
            weight = self.tensor(f"{name}.weight", size, in_features)
            if whole is None:
                whole = weight.new_empty(sum(rows for _, rows in parts), in_features)
            whole[first : first + size] = weight
            first += size
        assert whole is not None
        return whole
