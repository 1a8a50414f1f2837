"""How layers ask for their tensors: a scope of names over a weight source, in the dtypes layers need."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.checkpoint.load import WeightSource
from headlong.ops.backend import Backend
from headlong.ops.interfaces import Embedding
from headlong.ops.linear.linear import Linear, Projection, Shard
from headlong.ops.norm.normed import Norm
from headlong.quant.format import Weight


@dataclass(frozen=True)
class Scope:
    """`scope("layers.0")` is the scope below; `vector` is for small tensors, fp32 or wider."""

    source: WeightSource
    ops: Backend
    prefix: str = ""

    def __call__(self, name: str) -> "Scope":
        return Scope(self.source, self.ops, f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return self.source.has(self.prefix + name)

    def vector(self, name: str, *shape: int) -> Tensor:
        return self.source.vector(self.prefix + name, *shape, dtype=self.ops.activation_dtype)

    def indices(self, name: str, *shape: int, below: int) -> Tensor:
        """Whole numbers from 0 to `below` − 1."""
        return self.source.indices(self.prefix + name, *shape, below=below)

    def norm_weight(self, name: str, size: int, *, centred: bool = True) -> Tensor:
        """A norm's multiplier; a `centred` one is stored as w where 1 + w is meant."""
        weight = self.vector(f"{name}.weight", size)
        return weight + 1.0 if centred else weight

    def norm(self, name: str, size: int, eps: float, *, centred: bool = True, inside: bool = False) -> Norm:
        return self.ops.norm(self.norm_weight(name, size, centred=centred), eps, inside=inside)

    def matrix(self, name: str, out_features: int, in_features: int) -> Weight:
        return self.source.matrix(f"{self.prefix}{name}.weight", out_features, in_features)

    def linear(
        self, name: str, out_features: int, in_features: int, *, shard: Shard, bias: bool = False
    ) -> Linear:
        weight = self.matrix(name, out_features, in_features)
        offsets = self.vector(f"{name}.bias", out_features) if bias else None
        return self.ops.linear(weight, offsets, shard=shard)

    def embedding(self, name: str, num_tokens: int, size: int, *, shard: Shard) -> Embedding:
        return self.ops.embedding(self.matrix(name, num_tokens, size), shard=shard)

    def stacked(self, *parts: tuple[str, int], in_features: int, shard: Shard, bias: bool = False) -> Linear:
        """Several weights over the same input as one linear; `parts` are (name, out_features)."""
        return self.ops.stacked(*self._stack(parts, in_features, None, bias=bias), shard=shard)

    def projection(
        self,
        *parts: tuple[str, int],
        in_features: int,
        gates: slice,
        shard: Shard,
        order: Tensor | None = None,
        bias: bool = False,
    ) -> Projection:
        """The same for a layer's core, which needs outputs `gates` last. Output i is row `order[i]` of the parts one
        below the other."""
        return self.ops.projection(*self._stack(parts, in_features, order, bias=bias), gates, shard=shard)

    def _stack(
        self, parts: tuple[tuple[str, int], ...], in_features: int, order: Tensor | None, *, bias: bool
    ) -> tuple[list[Weight], Tensor | None, Tensor | None]:
        """Weights, the order they are still to be brought into, and what is added."""
        offsets = None
        if bias:
            offsets = torch.cat([self.vector(f"{name}.bias", size) for name, size in parts])
            offsets = offsets if order is None else offsets[order.to(offsets.device)]
        if self._kept_apart(parts):
            return [self.matrix(name, size, in_features) for name, size in parts], order, offsets
        return [self._joined(parts, in_features, order)], None, offsets

    def weights(self, *parts: tuple[str, int], in_features: int) -> list[Weight]:
        """Several weights over the same input, in one where they can be."""
        if self._kept_apart(parts):
            return [self.matrix(name, size, in_features) for name, size in parts]
        return [self._joined(parts, in_features, None)]

    def _kept_apart(self, parts: tuple[tuple[str, int], ...]) -> bool:
        """Backends that lay weights out anew take them one by one, and packed ones cannot be joined."""
        packed = (self.source.is_packed(f"{self.prefix}{name}.weight") for name, _ in parts)
        return self.ops.lays_out_weights or any(packed)

    def _joined(self, parts: tuple[tuple[str, int], ...], in_features: int, order: Tensor | None) -> Tensor:
        """Plain weights in one; filled part by part, so that no more than one part is held twice."""
        total = sum(size for _, size in parts)
        place = None if order is None else torch.empty_like(order).scatter_(0, order, torch.arange(total))
        whole, first = None, 0
        for name, size in parts:
            weight = self.matrix(name, size, in_features)
            assert isinstance(weight, Tensor)
            if whole is None:
                whole = weight.new_empty(total, in_features)
            rows = (
                slice(first, first + size) if place is None else place[first : first + size].to(whole.device)
            )
            whole[rows] = weight
            first += size
        assert whole is not None
        return whole

    def experts(self, name: str, count: int, out_features: int, in_features: int) -> list[Weight]:
        """The matrix of each expert, from one tensor that holds them all; its `name` has no suffix to come."""
        return self.source.experts(self.prefix + name, count, out_features, in_features)
