"""One checkpoint, opened: its configs and a table of every tensor, by its name on disk.

A folder of safetensors, or a GGUF file; a head may lie beside either in a file of its own. Reads headers only; tensor
data is read one tensor at a time, when asked. Knows nothing of canonical names or of models.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headlong.checkpoint.generation import read_beside
from headlong.checkpoint.gguf import GgufFile, open_gguf
from headlong.checkpoint.gguf_config import generation_config
from headlong.checkpoint.gguf_names import in_head, name_in_head, num_main_layers
from headlong.checkpoint.safetensors import read_file
from headlong.checkpoint.shards import (
    Shards,
    find_adapter,
    find_gguf,
    find_shards,
    find_sidecars,
    foreign_weights,
)
from headlong.checkpoint.strict_json import read_object
from headlong.checkpoint.tensor_info import TensorInfo, read_tensor
from headlong.errors import CheckpointError

log = logging.getLogger(__name__)
CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
QUANTIZE_CONFIG = "quantize_config.json"
ADAPTER = "an adapter (LoRA) that is not applied: merge it into the model to use it"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `folder` is what was opened: a folder, or the GGUF file itself. `config` is its
    config.json; a GGUF file has `metadata` instead, which its family reads."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    sidecars: frozenset[Path] = frozenset()
    """The files that hold an MTP head beside the model's own."""
    gguf_layers: Mapping[Path, int] = field(default_factory=dict)
    """For each GGUF file among the tensors' files, how many layers stand before the head."""
    mlx_files: frozenset[Path] = frozenset()
    """Safetensors files that say they were written by MLX, which stores some values in its own way."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The GGUF file's metadata (tokenizer, template, architecture); empty for safetensors."""
    quant_config: Mapping[str, Any] = field(default_factory=dict)
    """The content of hf_quant_config.json; empty where there is none."""
    quantize_config: Mapping[str, Any] = field(default_factory=dict)
    """The content of quantize_config.json, which GPTQ's tools write; empty where there is none."""
    sidecar_fault: str | None = None
    """Why a head's own file could not be read; its tensors are left out."""
    adapter: Path | None = None
    """An adapter (LoRA) that lies beside the model and is left alone."""

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Reads the configs and all tensor headers of a folder or of a GGUF file."""
        path = Path(path)
        if path.suffix == ".gguf" and path.is_file():
            return _open_gguf(path, path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: not a folder or .gguf file; pass the folder that holds {CONFIG}")
        shards = find_shards(path)
        if not shards.files and (file := find_gguf(path)) is not None:
            return _open_gguf(file, path)
        adapter = find_adapter(path)
        if adapter is not None and not shards.files:
            raise CheckpointError(
                f"{path}: holds an adapter ({adapter.name}) and no model; merge it into its model and pass that folder"
            )
        if not (path / CONFIG).exists():
            raise CheckpointError(f"{path}: has no {CONFIG}; pass the folder of a complete checkpoint")
        config = read_object(path / CONFIG, infinities=True)
        tensors, mlx_files, fault = _read_tensors(shards)
        if adapter is not None:
            log.warning("%s: %s", adapter, ADAPTER)
        return cls(
            folder=path,
            config=config,
            generation_config=read_beside(path),
            tensors=tensors,
            sidecars=frozenset(path / name for name in shards.sidecars),
            mlx_files=mlx_files,
            quant_config=_read_optional(path / QUANT_CONFIG),
            quantize_config=_read_optional(path / QUANTIZE_CONFIG),
            sidecar_fault=fault,
            adapter=adapter,
        )

    @property
    def nbytes(self) -> int:
        """How many bytes of tensor data there are, headers not counted."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def is_gguf(self) -> bool:
        return bool(self.metadata)

    @property
    def gguf_arch(self) -> str:
        return self.metadata["general.architecture"]

    def read(self, disk_name: str) -> torch.Tensor:
        """Reads one tensor as it is stored, onto the CPU."""
        if disk_name not in self.tensors:
            raise CheckpointError(f"{self.folder}: has no tensor {disk_name!r}")
        return read_tensor(self.tensors[disk_name])


def _read_optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def _read_tensors(shards: Shards) -> tuple[dict[str, TensorInfo], frozenset[Path], str | None]:
    folder = shards.folder
    if not shards.files and not shards.sidecars:
        foreign = foreign_weights(folder)
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        there = f"; {foreign[0]}{more} cannot be read, convert to safetensors first" if foreign else ""
        raise CheckpointError(f"{folder}: has no .safetensors and no .gguf files{there}")
    if missing := shards.missing():
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards.files)} shards are missing: {', '.join(missing)}; "
            "fetch them into this folder"
        )
    tensors: dict[str, TensorInfo] = {}
    mlx_files = set()
    fault = None
    absent = set(shards.weight_map or ())
    for file in (*shards.files, *shards.sidecars):
        try:
            found, metadata = read_file(folder / file)
        except CheckpointError as error:
            if file in shards.files:
                raise
            fault = str(error)
            continue
        if metadata.get("format") == "mlx":
            mlx_files.add(folder / file)
        for name, info in found.items():
            # The index decides which shard a tensor is taken from, and which tensors are left alone.
            if shards.weight_map is not None and file in shards.files:
                if shards.weight_map.get(name) != file:
                    continue
                absent.discard(name)
            _add(tensors, info)
    if absent:
        listed = ", ".join(f"{name!r} ({(shards.weight_map or {})[name]})" for name in sorted(absent))
        raise CheckpointError(
            f"{folder}: the index promises {len(absent)} tensors their shards lack: {listed}"
        )
    return tensors, frozenset(mlx_files), fault


def _add(tensors: dict[str, TensorInfo], info: TensorInfo) -> None:
    if other := tensors.get(info.name):
        raise CheckpointError(
            f"{info.file.parent}: tensor {info.name!r} is in both {other.file.name} and {info.file.name}; "
            "remove one of the two"
        )
    tensors[info.name] = info


def _open_gguf(path: Path, opened: Path) -> Checkpoint:
    """Opens a GGUF file and, where it has no head of its own, the head that lies beside it."""
    main = open_gguf(path)
    num_layers = _num_main_layers(main)
    tensors = dict(main.tensors)
    layers = dict.fromkeys({info.file for info in main.tensors.values()}, num_layers)
    sidecars, mlx_files = set(), set()
    fault = None
    if not any(".nextn." in name for name in main.tensors):
        for file in find_sidecars(path):
            try:
                found, is_mlx = _read_sidecar(file, main, layers)
            except CheckpointError as error:
                fault = str(error)
                continue
            sidecars.add(file)
            mlx_files |= {file} if is_mlx else set()
            for info in found:
                _add(tensors, info)
    return Checkpoint(
        folder=opened,
        config={},
        generation_config=generation_config(main.metadata) | read_beside(path),
        tensors=tensors,
        sidecars=frozenset(sidecars),
        gguf_layers=layers,
        mlx_files=frozenset(mlx_files),
        metadata=main.metadata,
        sidecar_fault=fault,
    )


def _num_main_layers(file: GgufFile) -> int:
    try:
        return num_main_layers(file.metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def _read_sidecar(file: Path, main: GgufFile, layers: dict[Path, int]) -> tuple[list[TensorInfo], bool]:
    """The head's tensors alone: a GGUF sidecar may repeat the target's embedding, which is not needed twice."""
    if file.suffix != ".gguf":
        found, metadata = read_file(file)
        return list(found.values()), metadata.get("format") == "mlx"
    side = open_gguf(file)
    num_layers = _num_main_layers(side)
    wanted = num_main_layers(main.metadata)
    if num_layers != wanted:
        raise CheckpointError(
            f"{file}: a head for {num_layers} layers, but {main.path.name} has {wanted}: it is another model's"
        )
    layers[file] = num_layers
    in_file = (replace(info, name=name_in_head(info.name, num_layers)) for info in side.tensors.values())
    kept = [info for info in in_file if in_head(info.name, num_layers)]
    log.info(
        "%s: %d tensors of the head, %d others left alone", file, len(kept), len(side.tensors) - len(kept)
    )
    if not kept:
        raise CheckpointError(
            f"{file}: has no block {layers[file]}, where the head of {main.path.name} should be"
        )
    return kept, False
