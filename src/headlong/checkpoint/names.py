"""What a tensor is called: from the names on disk to the one canonical name model code asks for.

What all safetensors checkpoints share is here: wrappers around the text model, MLX's name for the experts, and tensors
to skip (each with a reason). What an architecture alone calls its tensors its family says in a `Naming` and, for GGUF,
in a `GgufNames`. Knows nothing of which tensors a model needs; `verify` compares the two.

Canonical names are those of the text model without a prefix: `embed_tokens.weight`,
`layers.0.self_attn.q_proj.weight`, `norm.weight`, `lm_head.weight`, and the head's under `mtp.`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.gguf_names import GgufNames
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.checkpoint.transforms import IDENTITY, Shape, Transform
from headlong.errors import CheckpointError
from headlong.quant.detect import PART_NAMES

WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""The prefixes that may stand before the text model's own names; the first that fits is cut off."""
RENAMES = (
    (re.compile(r"\.mlp\.switch_mlp\."), ".mlp.experts."),
    (re.compile(r"\.mlp\.shared_experts\."), ".mlp.shared_expert."),
    (re.compile(r"\.mlp\.router\."), ".mlp.gate."),
    (re.compile(r"\.self_attn\.embed_q\."), ".self_attn.k_b_proj."),
    (re.compile(r"\.self_attn\.unembed_out\."), ".self_attn.v_b_proj."),
)
"""Patterns of names to replace. MLX has names of its own for the experts and for the two halves of what makes keys and
values of latents, and some families for the shared expert or for the router."""

_VISION = "vision tower: Headlong serves text"
_ROTARY = "rotary frequencies: computed, not stored"
_COPY = "copy of the target's embedding or lm_head in the head: the target's serves both"
_KV_SCALE = "scales of a quantised KV cache: Headlong keeps keys and values in float"
SKIPS = (
    (re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\."), _VISION),
    (re.compile(r".*\.rotary_emb\.inv_freq$"), _ROTARY),
    (re.compile(r".*\.self_attn\.([kv]_proj\.)?[qkv]_(scale|zero_point)$"), _KV_SCALE),
    (re.compile(r".*\.self_attn\.[kv]_proj\.output_scale$"), _KV_SCALE),
)
_WEIGHT_PARTS = {part: part for part in PART_NAMES}
_FUSED_PARTS = (
    {"": "weight"}
    | {f"_{part}": part for part in PART_NAMES}
    | {f"_{part.removeprefix('weight_')}": part for part in PART_NAMES if part.startswith("weight_")}
)
"""The endings by which parts of a tensor without `.weight` (fused experts) are known, as in
`gate_up_proj_scale_inv`."""


@dataclass(frozen=True)
class Skip:
    """A tensor that is on disk and deliberately not loaded."""

    reason: str


def as_usual(canonical_name: str, stored: Shape) -> Transform:  # noqa: ARG001 - whatever the tensor
    return IDENTITY


def as_it_is(canonical_name: str) -> Transform:  # noqa: ARG001 - whatever the tensor
    return IDENTITY


@dataclass(frozen=True)
class Naming:
    """What a family's tensors are called in safetensors, where that is not their canonical name."""

    head_layer: str | None = None
    """How the names of the head's layer k begin: with `{k}` in it, or with `{block}` for k after the main layers. None
    where they are canonical, `mtp.layers.{k}.`"""
    head_modules: Mapping[str, str] = field(default_factory=dict)
    """Modules of a head's layer by their names on disk, with the canonical ones."""
    shared_experts: str = "shared_expert"
    """What the shared expert is called."""
    router: str = "gate"
    """What the router of the experts is called."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Modules and tensors by their names on disk, with the canonical ones; `{}` stands for a number."""
    copies: bool = False
    """Whether the head's layers have copies of the target's embedding and lm_head."""
    stored: Callable[[str], Transform] = as_it_is
    """How the tensor of a canonical name is stored, whoever wrote the file."""
    mlx: Callable[[str, Shape], Transform] = as_usual
    """How a file written by MLX stores the tensor of a canonical name and a shape on disk."""

    def canonical(self, name: str, num_layers: int) -> str:
        """The canonical form of a name without its wrapper, in a model of `num_layers` main layers."""
        name = _renamed(name, self.modules)
        if self.head_layer is None or (match := self._pattern.match(name)) is None:
            return name
        k = int(match[1]) - ("{block}" in self.head_layer) * num_layers
        if k < 0:
            return name
        rest = _replaced(name[match.end() :], self.head_modules)
        return f"mtp.layers.{k}.{rest}"

    def disk(self, canonical_name: str, num_layers: int) -> str:
        """The name of a tensor on disk: of this family's head in a file of its own, and what stands in a layer."""
        if self.modules:
            return _renamed(canonical_name, {name: disk for disk, name in self.modules.items()})
        canonical_name = canonical_name.replace(".mlp.shared_expert.", f".mlp.{self.shared_experts}.")
        canonical_name = canonical_name.replace(".mlp.gate.", f".mlp.{self.router}.")
        match = _HEAD_LAYER.match(canonical_name)
        if self.head_layer is None or match is None:
            return canonical_name
        prefix = self.head_layer.format(k=match[1], block=int(match[1]) + num_layers)
        modules = {name: disk for disk, name in self.head_modules.items()}
        return f"model.{prefix}{_replaced(canonical_name[match.end() :], modules)}"

    @property
    def _pattern(self) -> re.Pattern[str]:
        assert self.head_layer is not None
        return re.compile(re.sub(r"\\{(k|block)\\}", r"(\\d+)", re.escape(self.head_layer)))


CANONICAL = Naming()
_HEAD_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
_HEAD_COPY = re.compile(r"mtp\.layers\.\d+\.(?=(embed_tokens|lm_head)\.)")


def _replaced(name: str, modules: Mapping[str, str]) -> str:
    for module, replacement in modules.items():
        if name.startswith(f"{module}."):
            return replacement + name[len(module) :]
    return name


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    """The name with its longest beginning that is one of the modules replaced, numbers kept."""
    if not modules:
        return name
    parts = name.split(".")
    numbers = [part for part in parts if part.isdecimal()]
    plain = ["{}" if part.isdecimal() else part for part in parts]
    for count in range(len(parts), 0, -1):
        replacement = modules.get(".".join(plain[:count]))
        if replacement is not None:
            return ".".join([replacement.format(*numbers), *parts[count:]])
    return name


def canonical(
    disk_name: str, naming: Naming = CANONICAL, *, num_layers: int = 0, sidecar: bool = False
) -> str | Skip:
    """The canonical name of one safetensors tensor. In a `sidecar` every tensor belongs to the head."""
    for pattern, reason in SKIPS:
        if pattern.match(disk_name):
            return Skip(reason)
    prefix = next((prefix for prefix in WRAPPERS if disk_name.startswith(prefix)), "")
    name = naming.canonical(disk_name[len(prefix) :], num_layers)
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return f"mtp.{name}" if sidecar and not name.startswith("mtp.") else name


class NameMap:
    """The canonical names of a checkpoint: for each the tensor on disk, how its values are stored where that is not
    the usual way, and the tensors left alone, by reason."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        naming: Naming = CANONICAL,
        gguf: GgufNames | None = None,
        num_layers: int = 0,
    ) -> None:
        """`gguf` names what lies in GGUF files; `num_layers` are the main layers of safetensors files."""
        self.sources: dict[str, TensorInfo] = {}
        self.transforms: dict[str, Transform] = {}
        self._of_disk: dict[str, Transform] = {}
        self.skipped: dict[str, list[str]] = {}
        self.copies: list[tuple[str, TensorInfo]] = []
        """What the head has of its target: the canonical name there, and the tensor that is not loaded."""
        self._copies = naming.copies
        self._parts: dict[str, dict[str, TensorInfo]] = {}
        """The parts of the matrices that were asked about."""
        for disk_name, info in checkpoint.tensors.items():
            if info.file in checkpoint.gguf_layers:
                assert gguf is not None, "a GGUF file is named by its architecture's table"
                self._add_gguf(disk_name, info, gguf, checkpoint.gguf_layers[info.file])
                continue
            in_sidecar = info.file in checkpoint.sidecars
            name = canonical(disk_name, naming, num_layers=num_layers, sidecar=in_sidecar)
            if isinstance(name, Skip):
                self.skipped.setdefault(name.reason, []).append(disk_name)
                continue
            self._claim(name, info)
            self._transform(name, naming.stored(name))
            if info.file in checkpoint.mlx_files:
                self._transform(name, naming.mlx(name, info.shape))

    def __contains__(self, name: object) -> bool:
        """True if `name` is there, packed or not."""
        return name in self.sources or (isinstance(name, str) and bool(self.parts(name)))

    @property
    def head_layers(self) -> int:
        """How many layers the MTP head has, by its tensors; 0 without a head."""
        heads = [name for name in self.sources if name.startswith("mtp.")]
        numbers = [int(match[1]) for name in heads if (match := _HEAD_LAYER.match(name)) is not None]
        return max(numbers, default=0) + 1 if heads else 0

    def parts(self, name: str) -> dict[str, TensorInfo]:
        """The tensors that make up the matrix `name`, by the part that each is (`weight`, `scales`, …); empty where
        there are none."""
        if (known := self._parts.get(name)) is not None:
            return known
        if name.endswith(".weight"):
            endings, stem = _WEIGHT_PARTS, name.removesuffix("weight")
        else:
            endings, stem = _FUSED_PARTS, name
        found = {part: info for ending, part in endings.items() if (info := self.sources.get(stem + ending))}
        return self._parts.setdefault(name, dict(sorted(found.items())))

    def transform_of(self, info: TensorInfo) -> Transform:
        """How the values of a tensor on disk are stored."""
        return self._of_disk.get(info.name, IDENTITY)

    def _add_gguf(self, disk_name: str, info: TensorInfo, gguf: GgufNames, num_layers: int) -> None:
        name = gguf.canonical(disk_name, num_layers)
        if name is None:
            # Whatever is in the head's first block is the head's: unknown there, it makes only the head unusable. In a
            # later one it may mean that the file counts its layers wrongly, which makes the model unusable.
            name = f"mtp.{disk_name}" if disk_name.startswith(f"blk.{num_layers}.") else disk_name
        else:
            self._claim(name, info)
            self._transform(name, gguf.transform(name))
            return
        self._claim(name, info)

    def _transform(self, name: str, transform: Transform) -> None:
        if transform is not IDENTITY and name in self.sources:
            self.transforms[name] = self._of_disk[self.sources[name].name] = transform

    def _claim(self, name: str, info: TensorInfo) -> None:
        if self._copies and (match := _HEAD_COPY.match(name)) is not None:
            self.copies.append((name[match.end() :], info))
            self.skipped.setdefault(_COPY, []).append(info.name)
            return
        if name in self.sources:
            raise CheckpointError(
                f"{self.sources[name].name!r} and {info.name!r} on disk are both {name!r}; remove one of the two"
            )
        self.sources[name] = info
