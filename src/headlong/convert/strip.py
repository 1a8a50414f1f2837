"""Writes a model without its MTP head, in the container it came in. All else stays byte for byte. Knows no command
line."""

import re
from pathlib import Path
from typing import Any

from headlong.checkpoint.checkpoint import CONFIG, QUANT_CONFIG, Checkpoint
from headlong.checkpoint.gguf_writing import write_gguf
from headlong.checkpoint.safetensors import read_file
from headlong.checkpoint.shards import INDEX, find_shards
from headlong.checkpoint.strict_json import read_object
from headlong.checkpoint.writing import replacing, replacing_folder, write_safetensors
from headlong.convert.folder import (
    copy_files,
    inspect_result,
    other_files,
    refuse_overlap,
    with_head_layers,
    write_json,
    written,
)
from headlong.convert.head import all_of_head, head_tensors, is_head_alone, require_head, without_head
from headlong.convert.head_entries import verbatim, with_blocks
from headlong.convert.to_gguf import Written
from headlong.errors import CheckpointError
from headlong.progress import ProgressFn, silent


def strip(
    checkpoint: Checkpoint, out: Path, *, force: bool = False, progress: ProgressFn = silent
) -> Written:
    """Writes `checkpoint` without its head to `out`: a folder for a folder, a .gguf file for a .gguf file."""
    require_head(checkpoint)
    if is_head_alone(checkpoint):
        raise CheckpointError(f"{checkpoint.folder}: holds a head and no model, so nothing would be left")
    refuse_overlap(out, checkpoint.folder)
    if checkpoint.folder.is_dir():
        if out.suffix == ".gguf":
            raise CheckpointError(
                f"{out}: {checkpoint.folder} is a folder, and so must be what it is written to"
            )
        with replacing_folder(out, force=force) as partial:
            write_folder(checkpoint, partial, progress)
            return written(out, inspect_result(partial, head=False))
    if out.suffix != ".gguf":
        raise CheckpointError(f"{out}: {checkpoint.folder} is GGUF, so the name to write must end in .gguf")
    with replacing(out, force=force) as partial:
        write_file(checkpoint, partial, progress)
        return written(out, inspect_result(partial, head=False))


def write_folder(checkpoint: Checkpoint, out: Path, progress: ProgressFn) -> None:
    """Writes the files of a folder, GGUF or safetensors, into `out` without the head, if there is one."""
    folder = checkpoint.folder
    if checkpoint.is_gguf:
        copy_files(other_files(folder), out, progress)
        write_model_files(checkpoint, out, progress)
        return
    write_json(out / CONFIG, with_head_layers(checkpoint.config, 0))
    if checkpoint.quant_config:
        write_json(out / QUANT_CONFIG, checkpoint.quant_config)
    copy_files(other_files(folder), out, progress)
    shards = find_shards(folder)
    head, kept = all_of_head(checkpoint), without_head(checkpoint)
    touched = {info.file for info in head}
    copy_files([folder / f for f in shards.files if folder / f not in touched], out, progress, "copy weights")
    for file in sorted(touched & {folder / f for f in shards.files}):
        rest = sorted((i for i in kept.tensors.values() if i.file == file), key=lambda info: info.start)
        if rest:
            metadata = {key: str(value) for key, value in read_file(file)[1].items()}
            write_safetensors(
                out / file.name, [verbatim(i) for i in rest], metadata, progress, f"write {file.name}"
            )
    if shards.weight_map is not None:
        names = {info.name for info in head}
        left = {name: file for name, file in shards.weight_map.items() if name not in names}
        write_json(out / INDEX, index(folder, left, kept.nbytes))


def index(folder: Path, weight_map: dict[str, str], nbytes: int) -> dict[str, Any]:
    """The index of `folder` with another weight map."""
    before = read_object(folder / INDEX)
    metadata = before.get("metadata")
    if isinstance(metadata, dict) and "total_size" in metadata:
        before["metadata"] = metadata | {"total_size": nbytes}
    return before | {"weight_map": weight_map}


def main_files(checkpoint: Checkpoint) -> list[Path]:
    """The files of a GGUF model, without a head's file that lies beside them."""
    return sorted(file for file in checkpoint.gguf_layers if file not in checkpoint.sidecars)


def write_model_files(checkpoint: Checkpoint, out: Path, progress: ProgressFn) -> None:
    """Writes a GGUF model into the folder `out` under its own name. It is copied, or written anew as one file where it
    has a head inside or is split over several files."""
    files = main_files(checkpoint)
    inside = any(info.file in files for info in head_tensors(checkpoint).values())
    if inside or "split.count" in checkpoint.metadata:
        write_file(checkpoint, out / whole_name(files[0]), progress)
    else:
        copy_files(files, out, progress, "copy weights")


def whole_name(file: Path) -> str:
    """The name of a GGUF file without the number of its part."""
    return re.sub(r"-\d{5}-of-\d{5}(?=\.gguf$)", "", file.name)


def write_file(checkpoint: Checkpoint, path: Path, progress: ProgressFn) -> None:
    """Writes a GGUF model as one file without its head."""
    metadata = with_blocks(checkpoint.metadata, 0)
    entries = [verbatim(info) for info in without_head(checkpoint).tensors.values()]
    write_gguf(path, metadata, entries, progress)
