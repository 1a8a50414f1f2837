"""Which matrices are rounded to what, and how a quantisation config says so.

Layers' matrices are packed. Embedding and lm_head, routers and the other gates that decide much with few weights, `fc`
of the head and the vision tower stay as they are, and what makes keys and values of latents where it is a tensor for
each, head by head. Knows names, formats and the words of two methods; no files.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from headlong.checkpoint.detect import HEAD
from headlong.checkpoint.load import Need
from headlong.errors import ConfigError
from headlong.quant.compressed import CompressedInts
from headlong.quant.format import Format
from headlong.quant.fp8 import USUAL_BLOCK, Fp8Format
from headlong.quant.rtn import GROUPS, RtnFormat

RTN_FORMATS: tuple[RtnFormat, ...] = ("fp8", "fp8_block", "int8", "int4")
SMALLEST_GROUP = 8
KEEP: Literal["keep"] = "keep"
_SMALL = re.compile(
    r".*\.(in_proj_a|in_proj_b|in_proj_ba|mlp\.gate|shared_expert_gate|self_attn\.[kv]_b_proj)\.weight"
)
_VISION = re.compile(r"(.*\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
_VISION_RULE = r"re:(.*\.)?(visual|vision_tower|vision_model|multi_modal_projector)\..*"


@dataclass(frozen=True)
class Recipe:
    """What the layers' matrices and the head's are rounded to; None leaves the head as it is. `group` is the group size
    of int4."""

    layers: RtnFormat
    head: RtnFormat | None
    group: int

    def format(self, name: str, need: Need) -> RtnFormat | None:
        """The format that the tensor `name` is rounded to; None if it stays as it is."""
        in_layers = name.removeprefix(HEAD).startswith("layers.")
        if not need.is_matrix or not in_layers or _SMALL.fullmatch(name):
            return None
        return self.head if name.startswith(HEAD) else self.layers


def make_recipe(layers: str, head: str, group_size: int, columns: Iterable[int]) -> Recipe:
    """Makes the recipe, after checking that one quantisation config can describe it. `columns` are the widths of the
    matrices that will be packed."""
    if layers not in RTN_FORMATS or head not in (KEEP, *RTN_FORMATS):
        raise ConfigError(
            f"--format takes {', '.join(RTN_FORMATS)} and --head {KEEP} or one of them, not {layers}, {head}"
        )
    if head != KEEP and head != layers and "fp8_block" in (layers, head):
        raise ConfigError(
            f"--head {head}: no quantisation config describes fp8_block and another format in one model; "
            f"use --head {KEEP} or --head {layers}"
        )
    if group_size < 1:
        raise ConfigError(f"--group-size must be at least 1, not {group_size}")
    widths = set(columns)
    # One group size for all matrices where any fits all: engines read several of them with one kernel.
    fitting = (
        group for group in (group_size, *GROUPS, SMALLEST_GROUP) if not any(width % group for width in widths)
    )
    return Recipe(layers, None if head == KEEP else head, next(fitting, group_size))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors describes a format. It has no words for some of what a `Format` says."""

    num_bits: int
    type: str
    strategy: str
    group_size: int | None
    format: str

    @classmethod
    def of(cls, format: Format) -> "Scheme | None":
        """The scheme of a format; None where compressed-tensors has no words for it."""
        if isinstance(format, Fp8Format):
            return (
                cls(8, "float", "channel", None, "float-quantized")
                if format.granularity == "channel"
                else None
            )
        assert isinstance(format, CompressedInts)
        group = format.group if format.shared == "group" else None
        return cls(
            format.width, "int", format.shared, group, "pack-quantized" if format.packed else "int-quantized"
        )

    def group(self, targets: Iterable[str]) -> dict[str, Any]:
        weights: dict[str, Any] = {"num_bits": self.num_bits, "type": self.type, "strategy": self.strategy}
        if self.group_size is not None:
            weights["group_size"] = self.group_size
        weights |= {"symmetric": True, "dynamic": False}
        return {"targets": list(dict.fromkeys(targets)), "weights": weights, "input_activations": None}


@dataclass
class Described:
    """The modules of each scheme by their names on disk, and those that stay as they are; filled while entries are
    made."""

    packed: dict[Scheme | None, list[str]] = field(default_factory=dict)
    head: dict[Scheme | None, list[str]] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    plain_head: list[str] = field(default_factory=list)

    def config(self, recipe: Recipe, skipped: Iterable[str]) -> dict[str, Any]:
        """The `quantization_config` of config.json. `skipped` are the tensors that Headlong does not read."""
        vision = any(_VISION.match(name) for name in skipped)
        if recipe.layers == "fp8_block":
            towers = {name.rpartition(".")[0] for name in skipped if _VISION.match(name)}
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": list(USUAL_BLOCK),
                "modules_to_not_convert": ["lm_head", *self.plain, *self.plain_head, *sorted(towers)],
            }
        schemes = {scheme for listed in (self.packed, self.head) for scheme in listed if scheme is not None}
        formats = {scheme.format for scheme in schemes}
        groups = self._groups()
        if len(formats) > 1:  # older readers know no format of a group's own
            groups = {label: group | {"format": scheme.format} for label, (scheme, group) in groups.items()}
        else:
            groups = {label: group for label, (_, group) in groups.items()}
        ignore = ["lm_head", *dict.fromkeys(map(_everywhere, self.plain)), *self.plain_head]
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "config_groups": groups,
            "ignore": ignore + ([_VISION_RULE] if vision else []),
        }

    def _groups(self) -> dict[str, tuple[Scheme, dict[str, Any]]]:
        """The config groups: the most frequent scheme targets all linear layers, the others name their modules."""
        usual = max(self.packed, key=lambda scheme: len(self.packed[scheme]))
        found = []
        for scheme, modules in self.packed.items():
            assert scheme is not None
            found.append((scheme, scheme.group(["Linear"] if scheme == usual else map(_everywhere, modules))))
        for scheme, modules in self.head.items():
            assert scheme is not None
            found.append((scheme, scheme.group(map(_experts_at_once, modules))))
        return {f"group_{number}": group for number, group in enumerate(found)}


def _everywhere(module: str) -> str:
    """A regular expression for this module in every layer of the target, whatever stands before `layers` in its
    name."""
    _, _, inside = module.rpartition("layers.")
    pattern = re.sub(r"(^|\\\.)\d+(?=\\\.)", r"\1\\d+", re.escape(inside))
    return rf"re:(?!(.*\.)?mtp\.)(.*\.)?layers\.{pattern}$"


def _experts_at_once(module: str) -> str:
    before, experts, after = module.partition(".experts.")
    if not experts:
        return module
    # Without the word itself: transformers takes the first rule that has it for the target's experts.
    return rf"re:(.*\.)?{re.escape(before)}\.\w+\.\d+\.{after.rpartition('.')[2]}$"
