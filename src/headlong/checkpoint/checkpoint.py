"""One checkpoint folder, opened: its configs and a table of every tensor, by its name on disk.

Reads headers only; tensor data is read one tensor at a time, when asked. Knows nothing of canonical names
or of models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headlong.checkpoint.safetensors import TensorInfo, read_header, read_tensor
from headlong.checkpoint.shards import Shards, find_shards
from headlong.checkpoint.strict_json import read_object
from headlong.errors import CheckpointError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors files and their configs.

    `sidecars` are the files that hold an MTP head beside the model's own shards.
    """

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    sidecars: frozenset[Path]

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """Reads the configs and all tensor headers of `folder`."""
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not a folder; pass the folder that holds {CONFIG}")
        if not (folder / CONFIG).exists():
            raise CheckpointError(f"{folder}: has no {CONFIG}; pass the folder of a complete checkpoint")
        config = read_object(folder / CONFIG)
        generation = folder / GENERATION_CONFIG
        generation_config = read_object(generation) if generation.exists() else {}
        shards = find_shards(folder)
        sidecars = frozenset(folder / name for name in shards.sidecars)
        return cls(folder, config, generation_config, _read_tensors(shards), sidecars)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data, the headers not counted."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, disk_name: str) -> torch.Tensor:
        """Reads one tensor as it is stored, onto the CPU."""
        if disk_name not in self.tensors:
            raise CheckpointError(f"{self.folder}: has no tensor {disk_name!r}")
        return read_tensor(self.tensors[disk_name])


def _read_tensors(shards: Shards) -> dict[str, TensorInfo]:
    folder = shards.folder
    if not shards.files and not shards.sidecars:
        raise CheckpointError(
            f"{folder}: has no .safetensors files; GGUF and .bin weights are not read here, "
            "convert them to safetensors first"
        )
    if missing := shards.missing():
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards.files)} shards are missing: {', '.join(missing)}; "
            "fetch them into this folder"
        )
    tensors: dict[str, TensorInfo] = {}
    absent = set(shards.weight_map or ())
    for file in (*shards.files, *shards.sidecars):
        for name, info in read_header(folder / file).items():
            # The index decides which shard a tensor is taken from, and which tensors are left alone.
            if shards.weight_map is not None and file in shards.files:
                if shards.weight_map.get(name) != file:
                    continue
                absent.discard(name)
            if name in tensors:
                other = tensors[name].file.name
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is in both {other} and {file}; remove one of the two"
                )
            tensors[name] = info
    if absent:
        listed = ", ".join(f"{name!r} ({(shards.weight_map or {})[name]})" for name in sorted(absent))
        raise CheckpointError(
            f"{folder}: the index promises {len(absent)} tensors their shards lack: {listed}"
        )
    return tensors
