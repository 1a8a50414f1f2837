"""Which files of a folder hold the tensors: an index's shards, a single file, loose files, a GGUF file, the MTP
sidecar.

Knows file names and the index; never opens a tensor file.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from headlong.checkpoint.strict_json import read_object
from headlong.errors import CheckpointError

log = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIDECAR_PATTERN = "mtp*.safetensors"
ADAPTER_PATTERN = "adapter_model*"
FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
"""The endings of weights that are not read."""
GGUF_SIDECAR_PATTERN = "mtp-*.gguf"
_LATER_SPLIT = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class Shards:
    """The tensor files of `folder`, by name. `weight_map` is that of the index; None where there is no index."""

    folder: Path
    files: tuple[str, ...]
    sidecars: tuple[str, ...]
    weight_map: dict[str, str] | None

    def missing(self) -> list[str]:
        """Files the index names and the folder lacks; a dangling link counts as lacking."""
        return [file for file in self.files if not (self.folder / file).is_file()]


def find_shards(folder: Path) -> Shards:
    """Finds the tensor files of `folder`; there may be none."""
    try:
        present = sorted(path.name for path in folder.glob("*.safetensors"))
        beside = {path.name for path in folder.glob(SIDECAR_PATTERN)}
        adapters = {path.name for path in folder.glob(ADAPTER_PATTERN)}
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror or error})") from error
    weight_map = None
    if (folder / INDEX).exists():
        weight_map = _read_weight_map(folder / INDEX)
        files = sorted(set(weight_map.values()))
    elif SINGLE in present:
        files = [SINGLE]
    else:
        files = [name for name in present if name not in beside | adapters]
    return Shards(folder, tuple(files), tuple(sorted(beside - set(files))), weight_map)


def find_adapter(folder: Path) -> Path | None:
    """The weights of an adapter (LoRA) beside the model, or its config; None where there is none."""
    found = (*sorted(folder.glob(ADAPTER_PATTERN)), folder / "adapter_config.json")
    return next((path for path in found if path.is_file()), None)


def foreign_weights(folder: Path) -> list[str]:
    """The names of files whose endings are those of weights that are not read."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in FOREIGN)


def find_gguf(folder: Path) -> Path | None:
    """The GGUF model of a folder, the first file of one that is split; None where there is none."""
    found = sorted(set(folder.glob("*.gguf")) - set(folder.glob(GGUF_SIDECAR_PATTERN)))
    files = [path for path in found if not _LATER_SPLIT.search(path.name)]
    if len(files) > 1:
        listed = ", ".join(path.name for path in files)
        raise CheckpointError(
            f"{folder}: holds {len(files)} GGUF models ({listed}); pass the path of one of them"
        )
    return files[0] if files else None


def find_sidecars(gguf: Path) -> list[Path]:
    """The head beside a GGUF file: `mtp-` before its own name, or the only one in the folder."""
    folder = gguf.parent
    if (own := folder / f"mtp-{gguf.name}").is_file():
        return [own]
    beside = sorted({*folder.glob(GGUF_SIDECAR_PATTERN), *folder.glob(SIDECAR_PATTERN)} - {gguf})
    if len(beside) > 1:
        listed = ", ".join(path.name for path in beside)
        log.warning(
            "%s: of the heads beside it (%s) none is named mtp-%s, so none is used", gguf, listed, gguf.name
        )
        return []
    return beside


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: needs a `weight_map` object from tensor names to file names")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise CheckpointError(
                f"{index}: tensor {tensor!r}: {file!r} is not the name of a .safetensors file in its folder"
            )
    return weight_map


def _is_plain_name(file: str) -> bool:
    """True for a bare file name; an index must not reach outside its folder."""
    return (
        file.endswith(".safetensors") and file.isprintable() and not any(c in file for c in ("/", "\\", ".."))
    )
