"""The MTP head of one artifact put onto a model in another, whichever containers the two are in.

The model's tensors stay byte for byte, and the head's too where the container is the same. What was written is matched
with its model before it gets its name. Knows no command line.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from headlong.checkpoint.checkpoint import CONFIG, QUANT_CONFIG, Checkpoint
from headlong.checkpoint.detect import HEAD
from headlong.checkpoint.gguf_writing import write_gguf
from headlong.checkpoint.shards import INDEX, find_shards
from headlong.checkpoint.writing import PARTIAL, replacing, replacing_folder, write_safetensors
from headlong.config import EngineConfig
from headlong.convert.folder import (
    copy_files,
    exclude,
    inspect_result,
    other_files,
    refuse_overlap,
    with_head_layers,
    write_json,
    written,
)
from headlong.convert.head import (
    check_fits,
    disk_name,
    head_tensors,
    joined,
    open_artifact,
    require_head,
    without_head,
)
from headlong.convert.head_entries import (
    gguf_head,
    gguf_spec,
    head_file_metadata,
    head_metadata,
    no_head_beside,
    safetensors_head,
    verbatim,
    with_blocks,
)
from headlong.convert.strip import index, main_files, whole_name, write_folder, write_model_files
from headlong.convert.to_gguf import Written, to_gguf
from headlong.engine.build import Blueprint, survey
from headlong.errors import CheckpointError, HeadError
from headlong.models import registry
from headlong.progress import ProgressFn, silent
from headlong.quant.plain import PlainFormat

SIDECAR = "mtp.safetensors"


def graft(
    base: Path,
    head: Path,
    out: Path,
    *,
    head_type: str = "bf16",
    force: bool = False,
    progress: ProgressFn = silent,
) -> Written:
    """Writes the model at `base` with the head at `head` to `out`, a folder or a .gguf file.

    `head_type` is what the head's matrices become where they enter a GGUF file from safetensors. A `base` that has a
    head already is refused unless `force`d, which replaces it, and `out` too.
    """
    refuse_overlap(out, base, head)
    model = _own(Checkpoint.open(base))
    donor = open_artifact(head, like=model)
    require_head(donor)
    if head_tensors(model) and not force:
        raise HeadError(f"{base}: has an MTP head already; use --force to replace it")
    check_fits(model, donor)
    whole = joined(model, donor)
    blueprint = survey(whole, EngineConfig(mtp="on"))
    if out.suffix == ".gguf":
        return _to_file(model, whole, out, head_type, force, progress)
    with replacing_folder(out, force=force) as partial:
        if model.is_gguf:
            _write_gguf_folder(model, whole, partial, progress)
        else:
            _write_safetensors_folder(model, whole, blueprint, partial, progress)
        return written(out, inspect_result(partial, head=True))


def _own(base: Checkpoint) -> Checkpoint:
    """The checkpoint without a head that lies beside its GGUF file: that head is not its own and may be the one to
    graft."""
    if base.folder.is_dir():
        return base
    files = main_files(base)
    return replace(
        base,
        tensors={name: info for name, info in base.tensors.items() if info.file in files},
        sidecars=frozenset(),
        gguf_layers={file: base.gguf_layers[file] for file in files},
    )


def _to_file(
    model: Checkpoint, whole: Checkpoint, out: Path, head_type: str, force: bool, progress: ProgressFn
) -> Written:
    if not (spec := gguf_spec(model)).runs_head:
        raise CheckpointError(f"{out}: {no_head_beside(spec)}")
    notes: list[str] = []
    with replacing(out, force=force) as partial:
        if model.is_gguf:
            bare = without_head(model)
            entries = [verbatim(info) for info in bare.tensors.values()] + gguf_head(whole, head_type)
            write_gguf(
                partial, with_blocks(model.metadata, registry.names_of(whole).head_layers), entries, progress
            )
        else:
            notes = _convert(model, whole, partial, head_type, progress)
        return written(out, inspect_result(partial, head=True), notes)


def _convert(
    model: Checkpoint, whole: Checkpoint, partial: Path, head_type: str, progress: ProgressFn
) -> list[str]:
    """Writes a safetensors model and a head from anywhere as one GGUF file."""
    with tempfile.TemporaryDirectory(prefix=f"{partial.name}.", suffix=PARTIAL, dir=partial.parent) as folder:
        if whole.is_gguf:  # the head is
            write_safetensors(Path(folder) / SIDECAR, safetensors_head(whole), head_metadata(model))
            whole = joined(model, open_artifact(Path(folder) / SIDECAR))
        return to_gguf(whole, partial, head_type=head_type, force=True, progress=progress).notes


def _write_gguf_folder(model: Checkpoint, whole: Checkpoint, out: Path, progress: ProgressFn) -> None:
    """Writes the GGUF file into a folder with the head in a file beside it."""
    if model.folder.is_dir():
        copy_files(other_files(model.folder), out, progress)
    write_model_files(model, out, progress)
    if all(info.file in whole.gguf_layers for info in head_tensors(whole).values()):
        path = out / f"mtp-{whole_name(main_files(model)[0])}"
        write_gguf(path, head_file_metadata(whole), gguf_head(whole, "bf16"), progress, "write head")
    else:
        write_safetensors(
            out / SIDECAR, safetensors_head(whole), head_metadata(model), progress, "write head"
        )


def _write_safetensors_folder(
    model: Checkpoint, whole: Checkpoint, blueprint: Blueprint, out: Path, progress: ProgressFn
) -> None:
    write_folder(model, out, progress)
    entries = safetensors_head(whole)
    write_safetensors(out / SIDECAR, entries, head_metadata(model), progress, "write head")
    if (out / INDEX).exists():
        listed = find_shards(out).weight_map or {}
        listed |= {entry.name: SIDECAR for entry in entries}
        write_json(out / INDEX, index(out, listed, Checkpoint.open(out).nbytes))
    config, beside = with_head_layers(model.config, blueprint.names.head_layers), dict(model.quant_config)
    exclude(config, beside, _plain_head_modules(blueprint))
    write_json(out / CONFIG, config)
    if beside:
        write_json(out / QUANT_CONFIG, beside)


def _plain_head_modules(blueprint: Blueprint) -> list[str]:
    """The head's matrices that will lie on disk in floats; those from GGUF are unpacked."""
    gguf = blueprint.checkpoint.gguf_layers
    return [
        disk_name(blueprint.checkpoint, name).removesuffix(".weight")
        for name, format in blueprint.formats.items()
        if name.startswith(HEAD)
        and (
            isinstance(format, PlainFormat)
            or any(info.file in gguf for info in blueprint.names.parts(name).values())
        )
    ]
