"""A model of a real one's shape with random weights, made on the device: speed does not ask what they mean."""

import json
from pathlib import Path

import torch
from torch import Tensor

from headlong.engine.build import Built
from headlong.layers.weights import Scope
from headlong.models import registry
from headlong.ops.registry import choose_backend
from headlong.quant.format import Weight
from headlong.quant.fp8 import Fp8Format, Fp8Weight

SPREAD = 0.02
"""Of weights: activations neither vanish nor blow up."""
BLOCK = 128
UNPACKED = (
    ".mlp.gate.weight",
    ".mlp.shared_expert_gate.weight",
    ".in_proj_a.weight",
    ".in_proj_b.weight",
)
"""Matrices of layers that FP8 checkpoints leave as they are."""


class RandomWeights:
    """A `WeightSource` of whatever is asked for. `fp8`: matrices of layers in eight bits, 128 × 128 to a scale, but for
    those that such checkpoints leave as they are."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, fp8: bool = False, num_active: int = 0
    ) -> None:
        """`num_active`: experts that a token is routed to."""
        self.dtype, self.device, self.fp8, self.num_active = dtype, device, fp8, num_active
        self.generator = torch.Generator(device).manual_seed(0)
        self.nbytes = 0
        """Of all matrices but the embedding, and of experts only those of one token: what a step of one token reads,
        the lm_head among it."""

    def has(self, name: str) -> bool:
        return name == "lm_head.weight"

    def is_packed(self, name: str) -> bool:
        return self.fp8 and "layers." in name and not name.endswith(UNPACKED)

    def vector(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: ARG002
        return self._normal(shape, dtype or self.dtype, 0.1)

    def matrix(self, name: str, out_features: int, in_features: int) -> Weight:
        weight = self._normal((1, out_features, in_features), self.dtype, SPREAD)
        if not name.startswith("embed"):
            self._count(name, out_features * in_features)
        return self._stored(name, weight)[0]

    def experts(self, name: str, count: int, out_features: int, in_features: int) -> list[Weight]:
        weights = self._normal((count, out_features, in_features), self.dtype, SPREAD)
        self._count(name, min(self.num_active, count) * out_features * in_features)
        return self._stored(name, weights)

    def _count(self, name: str, weights: int) -> None:
        self.nbytes += weights * (1 if self.is_packed(name) else self.dtype.itemsize)

    def _stored(self, name: str, weights: Tensor) -> list[Weight]:
        return self._packed(weights) if self.is_packed(name) else list(weights)

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype, spread: float) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=self.device)
        return made.normal_(0.0, spread, generator=self.generator)

    def _packed(self, weights: Tensor) -> list[Weight]:
        count, *shape = weights.shape
        grid = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        format = Fp8Format("block", (BLOCK, BLOCK), "F8_E4M3", "weight_scale_inv")
        scales = torch.full((count, *grid), 1.0 / 64.0, device=self.device)
        codes = weights.mul_(64.0).to(torch.float8_e4m3fn)
        return [
            Fp8Weight(format, shape[0], shape[1], format.block, code, scale)
            for code, scale in zip(codes, scales, strict=True)
        ]


def random_model(
    shape: Path, dtype: torch.dtype, device: torch.device, *, fp8: bool = False, layers: int | None = None
) -> tuple[Built, int, int]:
    """The model with its head, and the bytes that a step of one token of the target and one of the head read. `layers`:
    the first so many alone."""
    given = json.loads(shape.read_text())
    if layers is not None:
        given["num_hidden_layers"] = layers
        if "layer_types" in given:
            given["layer_types"] = given["layer_types"][:layers]
    family = registry.find(given)
    config = family.config(given)
    num_active = config.moe.num_active if config.moe is not None else 0
    ops, weights = choose_backend(dtype, device), RandomWeights(dtype, device, fp8=fp8, num_active=num_active)
    model = family.model(config, Scope(weights, ops))
    target = weights.nbytes
    head = family.head(config, Scope(weights, ops, "mtp."))
    lm_head = config.vocab_size * config.hidden_size * dtype.itemsize
    return Built(model, head, None, ops), target, weights.nbytes - target + lm_head
