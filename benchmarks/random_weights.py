"""A model of a real one's shape with random weights, made on the device: speed does not ask what they mean."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headlong.engine.build import Built
from headlong.layers.weights import Scope
from headlong.models import registry
from headlong.ops.interfaces import Experts
from headlong.ops.moe.routing import Routing
from headlong.ops.moe.weights import MoeWeights
from headlong.ops.registry import choose_backend
from headlong.quant.format import PackedWeight, Weight
from headlong.quant.fp8 import Fp8Format, Fp8Weight
from headlong.quant.mx import GROUP, MxFormat, Mxfp4Weight

SPREAD = 0.02
"""Of weights: activations neither vanish nor blow up."""
BLOCK = 128
FP8_SCALE = 2.0**-6
MXFP4_SCALES = (119, 122)
"""The least power of two that a group's numbers are multiplied by, as its byte says it, and the first too large one:
random codes have that spread then."""
UNPACKED = (
    ".mlp.gate.weight",
    ".mlp.shared_expert_gate.weight",
    ".in_proj_a.weight",
    ".in_proj_b.weight",
)
"""Matrices of layers that FP8 checkpoints leave as they are, and so is all that is part of a compressor."""
FEW_EXPERTS = 8
"""The experts of a layer that are made; the others are copies of them, each in a place of its own, which takes as long
to read."""
BYTES = {"fp8": 1.0, "mxfp4": (4 + 8 / GROUP) / 8}


class Packing(NamedTuple):
    """How matrices of layers are packed, and how their experts."""

    matrices: Literal["fp8"] | None = None
    experts: Literal["fp8", "mxfp4"] | None = None
    head: bool = False
    """Whether the head's are, too."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Packing":
        """As the shape's config says. Heads are left in bfloat16, as those who pack models leave them."""
        method = config.get("quantization_config", {}).get("quant_method")
        if method == "mxfp4":
            return cls(experts="mxfp4")
        if method == "fp8":
            return cls("fp8", "mxfp4" if config.get("expert_dtype") == "fp4" else "fp8")
        return cls()


@dataclass(frozen=True)
class Made:
    """A random model with its head, and the bytes of weights that a step of one token of each of them reads."""

    built: Built
    target_bytes: int
    draft_bytes: int


class RandomWeights:
    """A `WeightSource` of whatever is asked for."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, packing: Packing, *, num_active: int = 0
    ) -> None:
        """`num_active`: experts that a token is routed to."""
        self.dtype, self.device, self.packing, self.num_active = dtype, device, packing, num_active
        self.generator = torch.Generator(device).manual_seed(0)
        self.nbytes = 0
        """Of all matrices but the embedding, and of experts only those of one token: what a step of one token reads,
        the lm_head among it."""

    def has(self, name: str) -> bool:
        return name == "lm_head.weight"

    def is_packed(self, name: str) -> bool:
        return self._kind(name) is not None

    def vector(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = self._normal(shape, dtype or self.dtype, 0.1)
        if name.endswith("fn"):  # what mixes residual streams is as large as a matrix
            self.nbytes += made.nbytes
        return made

    def indices(self, name: str, *shape: int, below: int) -> Tensor:  # noqa: ARG002
        """Different ones in each row."""
        rows, count = shape
        drawn = torch.rand(rows, below, device=self.device, generator=self.generator)
        return drawn.topk(count).indices

    def matrix(self, name: str, out_features: int, in_features: int) -> Weight:
        if not name.startswith("embed"):
            self._count(name, out_features * in_features)
        return self._made(name, 1, out_features, in_features)[0]

    def experts(self, name: str, count: int, out_features: int, in_features: int) -> list[Weight]:
        self._count(name, min(self.num_active, count) * out_features * in_features)
        made = self._made(name, min(count, FEW_EXPERTS), out_features, in_features)
        return [made[expert % len(made)] for expert in range(count)]

    def _kind(self, name: str) -> str | None:
        """How a matrix is packed; None if it is not."""
        p = self.packing
        if "layers." not in name or not (p.head or name.startswith("layers.")):
            return None
        if name.endswith(UNPACKED) or ".compressor." in name:
            return None
        return p.experts if ".experts." in name else p.matrices

    def _count(self, name: str, weights: int) -> None:
        kind = self._kind(name)
        self.nbytes += int(weights * (self.dtype.itemsize if kind is None else BYTES[kind]))

    def _made(self, name: str, count: int, out_features: int, in_features: int) -> list[Weight]:
        kind, shape = self._kind(name), (count, out_features, in_features)
        if kind == "mxfp4":
            return [*self._mxfp4(shape)]
        weights = self._normal(shape, self.dtype, SPREAD)
        return [*self._fp8(weights)] if kind == "fp8" else list(weights)

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype, spread: float) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=self.device)
        return made.normal_(0.0, spread, generator=self.generator)

    def _fp8(self, weights: Tensor) -> list[PackedWeight]:
        count, *shape = weights.shape
        grid = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        format = Fp8Format("block", (BLOCK, BLOCK), "F8_E4M3", "weight_scale_inv")
        scales = torch.full((count, *grid), FP8_SCALE, device=self.device)
        codes = weights.mul_(1 / FP8_SCALE).to(torch.float8_e4m3fn)
        return [
            Fp8Weight(format, shape[0], shape[1], format.block, code, scale)
            for code, scale in zip(codes, scales, strict=True)
        ]

    def _mxfp4(self, shape: tuple[int, int, int]) -> list[PackedWeight]:
        count, outs, ins = shape
        codes = self._bytes(0, 256, count, outs, ins // 2)
        scales = self._bytes(*MXFP4_SCALES, count, outs, ins // GROUP).view(torch.float8_e8m0fnu)
        format = MxFormat("mxfp4", "weight", "scale")
        return [
            Mxfp4Weight(format, outs, ins, code, scale) for code, scale in zip(codes, scales, strict=True)
        ]

    def _bytes(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device=self.device, generator=self.generator
        )


def random_model(
    shape: Path, dtype: torch.dtype, device: torch.device, *, fp8: bool = False, layers: int | None = None
) -> Made:
    """`layers`: the first so many alone. `fp8`: all layers in eight bits, the head's too, 128 × 128 to a scale,
    whatever the shape's config says."""
    given = json.loads(shape.read_text())
    if layers is not None:
        given["num_hidden_layers"] = layers
        for each in ("layer_types", "compress_ratios"):
            if each in given:
                given[each] = given[each][:layers]
    family = registry.find(given)
    config = family.config(given)
    num_active = config.moe.num_active if config.moe is not None else 0
    ops = choose_backend(dtype, device)
    ops.experts = partial(_copied, ops.experts)  # type: ignore[method-assign]
    packing = Packing("fp8", "fp8", head=True) if fp8 else Packing.of(given)
    weights = RandomWeights(dtype, device, packing, num_active=num_active)
    model = family.model(config, Scope(weights, ops))
    target = weights.nbytes
    head = family.head(config, Scope(weights, ops, "mtp."))
    lm_head = config.vocab_size * config.hidden_size * dtype.itemsize
    return Made(Built(model, head, None, ops), target, weights.nbytes - target + lm_head)


def _copied(load: Callable[[MoeWeights], Experts], weights: MoeWeights) -> Experts:
    """The experts of a layer of which few are different, of which alone any is laid out anew: with hundreds of them
    that would take a minute."""
    count = weights.routing.num_experts
    few = (
        load(replace(weights, routing=Routing(FEW_EXPERTS, 1), bias_E=None)) if count > FEW_EXPERTS else None
    )
    if few is None or few.name != "triton":
        return load(weights)
    from headlong.ops.moe.triton import TritonExperts  # may be missing where others serve

    assert isinstance(few, TritonExperts)
    places = [expert % FEW_EXPERTS for expert in range(count)] + [FEW_EXPERTS] * few.has_shared

    def copied(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.stack([tensor[place] for place in places])

    parts = ("codes", "scales", "offsets_EGO", "row_scales_EO", "bias_EO")
    stacks = [
        replace(stack, **{part: copied(getattr(stack, part)) for part in parts})
        for stack in (few.gate_up, few.down)
    ]
    return TritonExperts(*stacks, weights)
