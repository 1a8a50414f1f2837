"""The tensors of any checkpoint as floats: unpacked, named and ordered as in a plain safetensors checkpoint.

Whatever the experts are stored as, they appear as three tensors per layer, [experts, out, in] each; what makes keys and
values of latents is one matrix, though a file may have two. Nothing is read before it is asked for, and matrices come a
few rows at a time. Knows nothing of how they will be written.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.detect import HEAD
from headlong.checkpoint.load import WeightLoader
from headlong.checkpoint.transforms import AS_IS, Order
from headlong.convert import latent
from headlong.engine.build import Blueprint, survey
from headlong.errors import CheckpointError
from headlong.quant.format import Weight
from headlong.quant.mx import MxFormat, Mxfp4Weight

TILE_ELEMENTS = 2**22
EXPERTS = ".mlp.experts."
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"


@dataclass(frozen=True)
class Experts:
    """One projection of all experts of a layer: `prefix` is `layers.0.mlp.experts`."""

    prefix: str
    projection: str

    @property
    def name(self) -> str:
        return f"{self.prefix}.{self.projection}.weight"

    @property
    def bias(self) -> str:
        return f"{self.prefix}.{self.projection}.bias"


class Source:
    """A checkpoint that fits its model. `shapes` has every tensor by canonical name."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.blueprint = blueprint = survey(checkpoint)
        has_head = any(name.startswith(HEAD) for name in blueprint.names.sources)
        if has_head and blueprint.head_refusal is not None:
            raise CheckpointError(
                f"{checkpoint.folder}: the MTP head cannot be converted: {blueprint.head_refusal}"
            )
        self.head_layers = blueprint.names.head_layers
        self.config = blueprint.config
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._experts: dict[str, Experts] = {}
        self._biases: dict[str, Experts] = {}
        for name, need in blueprint.expected.items():
            if EXPERTS in name and need.role == "vector":
                self._add_biases(name.partition(EXPERTS)[0] + EXPERTS.rstrip("."))
            elif EXPERTS in name:
                self._add_experts(name.partition(EXPERTS)[0] + EXPERTS.rstrip("."))
            elif latent.is_half(name):
                assert self.config.latent is not None
                self.shapes[latent.whole_name(name)] = latent.whole_shape(self.config.latent)
            else:
                self.shapes[name] = need.shape
        self._loader = _loader(blueprint)

    @property
    def has_head(self) -> bool:
        return self.head_layers > 0

    def _add_experts(self, prefix: str) -> None:
        moe = self.config.moe
        assert moe is not None
        for projection in (GATE, UP, DOWN):
            experts = Experts(prefix, projection)
            inner, outer = moe.intermediate_size, moe.hidden_size
            shape = (outer, inner) if projection == DOWN else (inner, outer)
            self._experts[experts.name] = experts
            self.shapes[experts.name] = (moe.num_experts, *shape)

    def _add_biases(self, prefix: str) -> None:
        moe = self.config.moe
        assert moe is not None
        for projection in (GATE, UP, DOWN):
            experts = Experts(prefix, projection)
            size = moe.hidden_size if projection == DOWN else moe.intermediate_size
            self._biases[experts.bias] = experts
            self.shapes[experts.bias] = (moe.num_experts, size)

    def is_vector(self, name: str) -> bool:
        """True if the tensor is read at once, as everything is that is no matrix."""
        if name in self._experts or name in self._biases:
            return name in self._biases
        need = self.blueprint.expected.get(name)
        return need is not None and need.role == "vector"

    def stays_mxfp4(self, name: str) -> bool:
        """True of a projection of experts that are stored in MXFP4, which loses nothing in another file's blocks."""
        if name not in self._experts:
            return False
        prefix, projection = self._experts[name].prefix, self._experts[name].projection
        fused = DOWN if projection == DOWN else "gate_up_proj"
        stored = (f"{prefix}.0.{projection}.weight", f"{prefix}.{projection}.weight", f"{prefix}.{fused}")
        formats = (self.blueprint.formats.get(name) for name in stored)
        return any(isinstance(format, MxFormat) and format.kind == "mxfp4" for format in formats)

    def vector(self, name: str, order: Order = AS_IS) -> Tensor:
        """A small tensor in float32, its rows in `order`."""
        if name in self._biases:
            return self._bias(self._biases[name])
        tensor = self._loader.vector(name, *self.shapes[name], dtype=torch.float32)
        rows = self._composed(name, order).rows
        return tensor if rows is None else tensor[rows]

    def _bias(self, experts: Experts) -> Tensor:
        """What is added to one projection of all experts."""
        prefix, projection, expected = experts.prefix, experts.projection, self.blueprint.expected
        count, size = self.shapes[experts.bias]

        def read(name: str, *shape: int) -> Tensor:
            return self._loader.vector(name, *shape, dtype=torch.float32)

        if f"{prefix}.0.{projection}.bias" in expected:
            return torch.stack([read(f"{prefix}.{e}.{projection}.bias", size) for e in range(count)])
        if experts.bias in expected:
            return read(experts.bias, count, size)
        if projection == DOWN:
            return read(f"{prefix}.down_proj_bias", count, size)
        both = read(f"{prefix}.gate_up_proj_bias", count, 2 * size)
        return both.chunk(2, 1)[projection == UP]

    def is_table(self, name: str) -> bool:
        """True if the tensor holds whole numbers."""
        need = self.blueprint.expected.get(name)
        return need is not None and need.role == "indices"

    def table(self, name: str) -> Tensor:
        """A tensor of whole numbers, int64."""
        return self._loader.indices(name, *self.shapes[name], below=1 << 31)

    def read_float(self, name: str, order: Order = AS_IS) -> Iterator[Tensor]:
        """A matrix in float32, a few rows at a time, rows and columns in `order`; experts one after the other."""
        if name in self._experts:
            for expert in self.read_experts(self._experts[name]):
                yield from expert
            return
        if name not in self.blueprint.expected:
            assert latent.is_expanding(name)
            yield from self._read_expanding(name)
            return
        out_features, in_features = self.shapes[name]
        weight = self._loader.matrix(name, out_features, in_features)
        yield from _tiles(weight, 0, out_features, self._composed(name, order))

    def _read_expanding(self, name: str) -> Iterator[Tensor]:
        assert self.config.latent is not None
        both = zip(latent.half_names(name), latent.half_shapes(self.config.latent), strict=True)
        keys, values = (self._loader.experts(half, *shape) for half, shape in both)
        yield from latent.joined((_whole(head) for head in keys), (_whole(head) for head in values))

    def read_experts(self, experts: Experts) -> Iterator[Iterator[Tensor]]:
        """The rows of one projection, expert by expert."""
        for weight, first, last in self._expert_weights(experts):
            yield _tiles(weight, first, last)

    def read_mxfp4(self, name: str) -> Iterator[Tensor]:
        """The blocks of a projection that `stays_mxfp4`, expert by expert."""
        for weight, first, last in self._expert_weights(self._experts[name]):
            assert isinstance(weight, Mxfp4Weight)
            yield weight.blocks(first, last)

    def _expert_weights(self, experts: Experts) -> Iterator[tuple[Weight, int, int]]:
        """The matrix of each expert, and which of its rows are the projection's."""
        prefix, projection = experts.prefix, experts.projection
        count, out_features, in_features = self.shapes[experts.name]
        expected = self.blueprint.expected
        if f"{prefix}.0.{projection}.weight" in expected:
            for expert in range(count):
                name = f"{prefix}.{expert}.{projection}.weight"
                yield self._loader.matrix(name, out_features, in_features), 0, out_features
            return
        first, last = 0, out_features
        if experts.name in expected:
            weights = self._loader.experts(experts.name, count, out_features, in_features)
        elif projection == DOWN:
            weights = self._loader.experts(f"{prefix}.{DOWN}", count, out_features, in_features)
        else:
            weights = self._loader.experts(f"{prefix}.gate_up_proj", count, 2 * out_features, in_features)
            first = 0 if projection == GATE else out_features
            last = first + out_features
        for weight in weights:
            yield weight, first, last

    def _composed(self, name: str, order: Order) -> Order:
        """Turns an `order` of the model's rows and columns into one of those in the file."""
        gguf, delta_net = self.blueprint.family.gguf, self.config.delta_net
        tiled = gguf is not None and delta_net is not None and delta_net.tiled
        stored = gguf.order(name, self.config) if gguf is not None and tiled else AS_IS
        return Order(_then(stored.rows, order.rows), _then(stored.columns, order.columns))


def _loader(blueprint: Blueprint) -> WeightLoader:
    # Floats stay as they are stored until their rows are asked for.
    return WeightLoader(
        blueprint.names,
        blueprint.detector,
        torch.float32,
        "cpu",
        keep_stored=True,
        row_order=blueprint.row_order,
    )


def _whole(weight: Weight) -> Tensor:
    return torch.cat(
        list(_tiles(weight, 0, weight.shape[0] if isinstance(weight, Tensor) else weight.out_features))
    )


def _then(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return first if second is None else second
    return first[second]


def _tiles(weight: Weight, first: int, last: int, order: Order = AS_IS) -> Iterator[Tensor]:
    step = max(
        1,
        TILE_ELEMENTS // weight.shape[-1]
        if isinstance(weight, Tensor)
        else TILE_ELEMENTS // weight.in_features,
    )
    for at in range(first, last, step):
        end = min(at + step, last)
        if order.rows is not None:
            rows = order.rows[at:end]
            tile = weight[rows] if isinstance(weight, Tensor) else weight.dequantize_rows(rows)
        else:
            tile = weight[at:end] if isinstance(weight, Tensor) else weight.dequantize(at, end)
        yield tile.float() if order.columns is None else tile.float()[:, order.columns]
