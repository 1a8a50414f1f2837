"""What a tensor is called: from the names on disk to the one canonical name model code asks for.

Two tables hold all that is known of safetensors spelling: prefixes to rewrite and tensors to skip (each with a
reason); GGUF has a table of its own. Knows nothing of which tensors a model needs; `verify` compares the two.

Canonical names are those of the text model without a prefix: `embed_tokens.weight`,
`layers.0.self_attn.q_proj.weight`, `norm.weight`, `lm_head.weight`, and the head's under `mtp.`.
"""

import re
from dataclasses import dataclass

from headlong.checkpoint import gguf_names
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.checkpoint.transforms import IDENTITY, MLX_CONV, NORM, Transform
from headlong.errors import CheckpointError
from headlong.quant.detect import PART_NAMES

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
RENAMES = ((re.compile(r"\.mlp\.switch_mlp\."), ".mlp.experts."),)
"""MLX's name for the experts."""

_VISION = "vision tower: Headlong serves text"
_ROTARY = "rotary frequencies: computed, not stored"
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
"""How the parts of a tensor without `.weight` (fused experts) are told: `gate_up_proj_scale_inv` and the like."""


@dataclass(frozen=True)
class Skip:
    """A tensor that is on disk and deliberately not loaded."""

    reason: str


def canonical(disk_name: str, sidecar: bool = False) -> str | Skip:
    """The canonical name of one safetensors tensor. In a `sidecar` every tensor belongs to the head."""
    for pattern, reason in SKIPS:
        if pattern.match(disk_name):
            return Skip(reason)
    name = disk_name
    for prefix, replacement in PREFIXES:
        if disk_name.startswith(prefix):
            name = replacement + disk_name[len(prefix) :]
            break
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return f"mtp.{name}" if sidecar and not name.startswith("mtp.") else name


class NameMap:
    """The canonical names of a checkpoint: for each the tensor on disk, how its values are stored where that is not
    the usual way, and the tensors left alone, by reason."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.sources: dict[str, TensorInfo] = {}
        self.transforms: dict[str, Transform] = {}
        self.skipped: dict[str, list[str]] = {}
        self._parts: dict[str, dict[str, TensorInfo]] = {}
        """Of the matrices that were asked about."""
        has_conv = any(name.endswith("conv1d.weight") for name in checkpoint.tensors)
        for disk_name, info in checkpoint.tensors.items():
            if info.file in checkpoint.gguf_layers:
                self._add_gguf(disk_name, info, checkpoint)
                continue
            name = canonical(disk_name, sidecar=info.file in checkpoint.sidecars)
            if isinstance(name, Skip):
                self.skipped.setdefault(name.reason, []).append(disk_name)
                continue
            self._claim(name, info)
            if info.file in checkpoint.mlx_files and has_conv:
                self.transforms |= _mlx_transform(name, info)

    def __contains__(self, name: object) -> bool:
        """True if `name` is there, packed or not."""
        return name in self.sources or (isinstance(name, str) and bool(self.parts(name)))

    def parts(self, name: str) -> dict[str, TensorInfo]:
        """The tensors that make up the matrix `name`, by what they are to it; empty where there are none."""
        if (known := self._parts.get(name)) is not None:
            return known
        if name.endswith(".weight"):
            endings, stem = _WEIGHT_PARTS, name.removesuffix("weight")
        else:
            endings, stem = _FUSED_PARTS, name
        found = {part: info for ending, part in endings.items() if (info := self.sources.get(stem + ending))}
        return self._parts.setdefault(name, dict(sorted(found.items())))

    def _add_gguf(self, disk_name: str, info: TensorInfo, checkpoint: Checkpoint) -> None:
        arch = checkpoint.gguf_arch
        name = gguf_names.canonical(disk_name, arch, checkpoint.gguf_layers[info.file])
        if name is None:
            # Whatever is in the head's block is the head's: unknown there, it makes only the head unusable.
            in_head = disk_name.startswith(f"blk.{checkpoint.gguf_layers[info.file]}.")
            name = f"mtp.{disk_name}" if in_head else disk_name
        else:
            transform = gguf_names.transform(name, arch)
            if transform is not IDENTITY:
                self.transforms[name] = transform
        self._claim(name, info)

    def _claim(self, name: str, info: TensorInfo) -> None:
        if name in self.sources:
            raise CheckpointError(
                f"{self.sources[name].name!r} and {info.name!r} on disk are both {name!r}; remove one of the two"
            )
        self.sources[name] = info


def _mlx_transform(name: str, info: TensorInfo) -> dict[str, Transform]:
    """MLX stores the norms of the Qwen family (the one with convolutions) with 1 added, and its convolutions with the
    taps in the middle."""
    if name.endswith("conv1d.weight"):
        return {name: MLX_CONV}
    kind = name.removesuffix(".weight").rpartition(".")[2]
    is_norm = len(info.shape) == 1 and (kind.endswith("norm") or kind.startswith("pre_fc_norm_"))
    return {name: NORM} if is_norm and not name.endswith("linear_attn.norm.weight") else {}
