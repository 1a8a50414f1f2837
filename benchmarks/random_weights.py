"""A model of a real one's shape with random weights, made on the device: speed does not ask what they mean."""

import json
from pathlib import Path

import torch
from torch import Tensor

from headlong.engine.build import Built
from headlong.layers.weights import Scope
from headlong.models import registry
from headlong.ops.registry import Ops
from headlong.quant.format import Weight
from headlong.quant.fp8 import Fp8Format

SPREAD = 0.02
"""Of weights: activations neither vanish nor blow up."""
BLOCK = 128


class RandomWeights:
    """A `WeightSource` of whatever is asked for. `fp8`: matrices of layers in eight bits, 128 × 128 to a scale."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, fp8: bool = False) -> None:
        self.dtype, self.device, self.fp8 = dtype, device, fp8
        self.generator = torch.Generator(device).manual_seed(0)
        self.nbytes = 0
        """Of all matrices but the embedding: what a step reads, the lm_head among it."""

    def has(self, name: str) -> bool:
        return name == "lm_head.weight"

    def is_packed(self, name: str) -> bool:
        return self.fp8 and "layers." in name

    def vector(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: ARG002
        return self._normal(shape, dtype or self.dtype, 0.1)

    def matrix(self, name: str, out_features: int, in_features: int) -> Weight:
        weight = self._normal((out_features, in_features), self.dtype, SPREAD)
        if self.is_packed(name):
            weight = self._packed(weight)
        read = out_features * in_features * (1 if self.is_packed(name) else self.dtype.itemsize)
        self.nbytes += 0 if name.startswith("embed") else read
        return weight

    def experts(self, name: str, count: int, out_features: int, in_features: int) -> list[Weight]:
        return [self.matrix(name, out_features, in_features) for _ in range(count)]

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype, spread: float) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=self.device)
        return made.normal_(0.0, spread, generator=self.generator)

    def _packed(self, weight: Tensor) -> Weight:
        shape = (weight.shape[0], weight.shape[1])
        grid = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        format = Fp8Format("block", (BLOCK, BLOCK), "F8_E4M3", "weight_scale_inv")
        scale = torch.full(grid, 1.0 / 64.0, device=self.device)
        return format.pack(
            {"weight": (64.0 * weight).to(torch.float8_e4m3fn), "weight_scale_inv": scale}, shape
        )


def random_model(
    shape: Path, dtype: torch.dtype, device: torch.device, *, fp8: bool = False, layers: int | None = None
) -> tuple[Built, int, int]:
    """The model with its head, and the bytes that a step of the target and one of the head read. `layers`: the first so
    many alone."""
    given = json.loads(shape.read_text())
    if layers is not None:
        given |= {"num_hidden_layers": layers, "layer_types": given["layer_types"][:layers]}
    architecture = registry.find(given)
    config = architecture.parse(given)
    ops, weights = Ops(dtype, device), RandomWeights(dtype, device, fp8=fp8)
    model = architecture.model(config, Scope(weights, ops))
    target = weights.nbytes
    head = architecture.head(config, Scope(weights, ops, "mtp."))
    lm_head = config.vocab_size * config.hidden_size * dtype.itemsize
    return Built(model, head, None, ops), target, weights.nbytes - target + lm_head
