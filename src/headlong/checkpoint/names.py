"""What a tensor is called: from the names on disk to the one canonical name model code asks for.

Three tables hold all that is known of spelling: prefixes to rewrite, tensors to skip (each with a reason),
and experts to fuse. Knows nothing of which tensors a model needs; `load.verify` compares the two.

Canonical names are those of the text model without a prefix: `embed_tokens.weight`,
`layers.0.self_attn.q_proj.weight`, `norm.weight`, `lm_head.weight`, and the head's under `mtp.`.
"""

import re
from dataclasses import dataclass

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.safetensors import TensorInfo
from headlong.errors import CheckpointError

PREFIXES = (
    # Longest first, and the first match wins: `model.` is a prefix of most others.
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.mtp.", "mtp."),
    ("language_model.model.mtp.", "mtp."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", ""),
    ("language_model.model.", ""),
    ("language_model.mtp.", "mtp."),
    ("model.mtp.", "mtp."),
    ("lm_head.", "lm_head."),
    ("model.", ""),
    ("mtp.", "mtp."),
)

_VISION = "vision tower: Headlong serves text"
_ROTARY = "rotary frequencies: computed, not stored"
SKIPS = (
    (re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\."), _VISION),
    (re.compile(r".*\.rotary_emb\.inv_freq$"), _ROTARY),
)

EXPERT_PART = re.compile(
    r"(?P<experts>.*\.mlp\.experts)\.(?P<expert>0|[1-9][0-9]{0,4})\.(?P<projection>\w+)\.weight"
)
FUSIONS = {
    # Fused name -> the projections whose rows are stacked, in order, for each expert.
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
_FUSED_INTO = {projection: fused for fused, parts in FUSIONS.items() for projection in parts}


@dataclass(frozen=True)
class Skip:
    """A tensor that is on disk and deliberately not loaded."""

    reason: str


def canonical(disk_name: str, sidecar: bool = False) -> str | Skip:
    """The canonical name of one tensor on disk. In a `sidecar` every tensor belongs to the head."""
    for pattern, reason in SKIPS:
        if pattern.match(disk_name):
            return Skip(reason)
    name = disk_name
    for prefix, replacement in PREFIXES:
        if disk_name.startswith(prefix):
            name = replacement + disk_name[len(prefix) :]
            break
    return f"mtp.{name}" if sidecar and not name.startswith("mtp.") else name


@dataclass(frozen=True)
class Fused:
    """One canonical tensor stored as one matrix per expert and projection.

    The fused shape is [experts, projections * rows, columns]. `parts` maps (expert, projection) to what is
    on disk; holes are possible until `missing` says otherwise.
    """

    name: str
    projections: tuple[str, ...]
    parts: dict[tuple[int, str], TensorInfo]

    @property
    def num_experts(self) -> int:
        return 1 + max(expert for expert, _ in self.parts)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The fused shape, or None where parts are missing, not matrices, or of several shapes."""
        shapes = {info.shape for info in self.parts.values()}
        if len(shapes) != 1 or self.missing(self.num_experts):
            return None
        (shape,) = shapes
        if len(shape) != 2:
            return None
        return (self.num_experts, len(self.projections) * shape[0], shape[1])

    def ordered(self) -> list[TensorInfo]:
        """The parts in the order of the fused memory: by expert, then as the projections are stacked."""
        keys = sorted(self.parts, key=lambda key: (key[0], self.projections.index(key[1])))
        return [self.parts[key] for key in keys]

    def part_name(self, expert: int, projection: str) -> str:
        """Canonical name of one part."""
        return f"{self.name.rpartition('.')[0]}.{expert}.{projection}.weight"

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """What each part measures when the whole is `shape`, or None if it cannot be cut so."""
        if len(shape) != 3 or shape[1] % len(self.projections):
            return None
        return (shape[1] // len(self.projections), shape[2])

    def missing(self, num_experts: int) -> list[str]:
        """Canonical names of the parts that `num_experts` experts need and the disk lacks."""
        return [
            self.part_name(expert, projection)
            for expert in range(num_experts)
            for projection in self.projections
            if (expert, projection) not in self.parts
        ]


class NameMap:
    """The canonical names of a checkpoint.

    `sources` gives for each canonical name the disk names it is made of (several where it is fused),
    `fused` the recipe of those, `skipped` the disk names left alone, by reason.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.sources: dict[str, tuple[str, ...]] = {}
        self.fused: dict[str, Fused] = {}
        self.skipped: dict[str, list[str]] = {}
        for disk_name, info in checkpoint.tensors.items():
            name = canonical(disk_name, sidecar=info.file in checkpoint.sidecars)
            if isinstance(name, Skip):
                self.skipped.setdefault(name.reason, []).append(disk_name)
            elif (match := EXPERT_PART.fullmatch(name)) and match["projection"] in _FUSED_INTO:
                self._add_part(match["experts"], int(match["expert"]), match["projection"], info)
            else:
                self._claim(name, (disk_name,))
        for name, fused in self.fused.items():
            self._claim(name, tuple(info.name for info in fused.ordered()))

    def __contains__(self, name: object) -> bool:
        return name in self.sources

    def _add_part(self, experts: str, expert: int, projection: str, info: TensorInfo) -> None:
        kind = _FUSED_INTO[projection]
        name = f"{experts}.{kind}"
        fused = self.fused.setdefault(name, Fused(name, FUSIONS[kind], {}))
        if other := fused.parts.get((expert, projection)):
            raise _ambiguous(fused.part_name(expert, projection), other.name, info.name)
        fused.parts[expert, projection] = info

    def _claim(self, name: str, disk_names: tuple[str, ...]) -> None:
        if name in self.sources:
            raise _ambiguous(name, self.sources[name][0], disk_names[0])
        self.sources[name] = disk_names


def _ambiguous(name: str, first: str, second: str) -> CheckpointError:
    return CheckpointError(f"{first!r} and {second!r} on disk are both {name!r}; remove one of the two")
