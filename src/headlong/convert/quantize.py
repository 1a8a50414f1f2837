"""A checkpoint rounded to nearest and written again: FP8 and integers as a folder that compressed-tensors reads, GGUF
blocks as a file.

What is rounded to what is decided in `quant_recipe`, and done in `rounding` and `to_gguf`. Knows no command line.
"""

import tempfile
from pathlib import Path

import torch

from headlong.checkpoint.checkpoint import CONFIG, Checkpoint
from headlong.checkpoint.leftovers import PARTIAL, writing
from headlong.checkpoint.writing import replacing, replacing_folder, write_sharded
from headlong.convert.folder import (
    copy_files,
    inspect_result,
    other_files,
    refuse_overlap,
    write_json,
    written,
)
from headlong.convert.from_gguf import from_gguf
from headlong.convert.quant_recipe import KEEP, RTN_FORMATS, Recipe, make_recipe
from headlong.convert.rounding import Rounding, in_target
from headlong.convert.to_gguf import TYPES, Written, to_gguf
from headlong.engine.build import Blueprint, survey
from headlong.errors import CheckpointError, ConfigError
from headlong.progress import ProgressFn, silent
from headlong.quant.plain import PlainFormat

BLOCKS = tuple(type for type in TYPES if type.startswith("q"))
FORMATS = (*RTN_FORMATS, *BLOCKS)
_FLOATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def quantize(
    checkpoint: Checkpoint,
    out: Path,
    *,
    format: str,
    head: str = KEEP,
    group_size: int = 128,
    force: bool = False,
    progress: ProgressFn = silent,
) -> Written:
    """Writes `checkpoint` in `format` to `out`, a folder, or a .gguf file for the block types. `head` is what the MTP
    head becomes. A quantised source is refused unless `force`d."""
    if format not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, not {format!r}")
    refuse_overlap(out, checkpoint.folder)
    if (format in BLOCKS) != (out.suffix == ".gguf"):
        wanted = "a name ending in .gguf" if format in BLOCKS else "a folder"
        raise ConfigError(f"--format {format} is written to {wanted}, not to {out}")
    blueprint = survey(checkpoint)
    _refuse_packed(blueprint, force)
    if not (parent := out.absolute().parent).is_dir():
        raise CheckpointError(f"{out}: cannot be written, there is no folder {parent}; make it first")
    if checkpoint.is_gguf:
        with (
            tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=PARTIAL, dir=parent) as folder,
            writing(Path(folder)),
        ):
            plain, dtype = Path(folder) / checkpoint.folder.stem, blueprint.stored_dtype()
            from_gguf(checkpoint, plain, type=_FLOATS.get(dtype or torch.bfloat16, "bf16"), progress=progress)
            return _write(survey(Checkpoint.open(plain)), out, format, head, group_size, force, progress)
    return _write(blueprint, out, format, head, group_size, force, progress)


def _refuse_packed(blueprint: Blueprint, force: bool) -> None:
    packed = (
        f.label for name, f in blueprint.formats.items() if not isinstance(f, PlainFormat) and in_target(name)
    )
    if (label := next(packed, None)) is not None and not force:
        raise CheckpointError(
            f"{blueprint.checkpoint.folder}: is quantised already ({label}), and rounding twice loses more than once; "
            "start from the original, or use --force"
        )


def _write(
    blueprint: Blueprint,
    out: Path,
    format: str,
    head: str,
    group_size: int,
    force: bool,
    progress: ProgressFn,
) -> Written:
    if format in BLOCKS:
        return _write_blocks(blueprint, out, format, head, force, progress)
    widths = [
        need.shape[-1]
        for name, need in blueprint.expected.items()
        if Recipe("int4", "int4", group_size).format(name, need) and (in_target(name) or head != KEEP)
    ]
    recipe = make_recipe(format, head, group_size, widths)
    if recipe.head is not None and blueprint.head_refusal is not None:
        raise CheckpointError(f"--head {head}: {blueprint.head_refusal}")
    notes = []
    if "int4" in (recipe.layers, recipe.head) and recipe.group != group_size:
        notes.append(f"groups of {group_size} do not divide every row; groups of {recipe.group} are used")
    writer = Rounding(blueprint, recipe)
    entries = writer.entries()
    folder = blueprint.checkpoint.folder
    with replacing_folder(out, force=force) as partial:
        config = {
            k: v
            for k, v in blueprint.checkpoint.config.items()
            if k not in ("quantization", "quantization_config")
        }
        if isinstance(text := config.get("text_config"), dict):
            config["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
        config["quantization_config"] = writer.described.config(recipe, _skipped(blueprint))
        write_json(partial / CONFIG, config)
        copy_files(other_files(folder), partial, progress)
        write_sharded(partial, entries, {"format": "pt"}, progress)
        return written(out, inspect_result(partial, head=blueprint.head_refusal is None), notes)


def _write_blocks(
    blueprint: Blueprint, out: Path, format: str, head: str, force: bool, progress: ProgressFn
) -> Written:
    if head not in (KEEP, *TYPES):
        raise ConfigError(f"--head {head}: a GGUF file takes {KEEP}, {', '.join(TYPES)}")
    stored = blueprint.stored_dtype(head=True) or torch.bfloat16
    head_type = _FLOATS.get(stored, "f32") if head == KEEP else head
    with replacing(out, force=force) as partial:
        done = to_gguf(
            blueprint.checkpoint, partial, type=format, head_type=head_type, force=True, progress=progress
        )
        return written(out, inspect_result(partial, head=done.has_head), done.notes)


def _skipped(blueprint: Blueprint) -> list[str]:
    return [name for names in blueprint.names.skipped.values() for name in names]
