"""A head's tensors as they are written into either container: verbatim where the container is the same, else unpacked.

Safetensors names are those of the family; in GGUF the head is the block after the layers. Knows what GGUF metadata say
of the number of blocks; writes nothing itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.detect import HEAD
from headlong.checkpoint.gguf_names import in_head, num_main_layers
from headlong.checkpoint.tensor_info import TensorInfo, read_tensor
from headlong.checkpoint.transforms import Transform
from headlong.checkpoint.writing import Entry, copied
from headlong.convert.from_gguf import safetensors_entries
from headlong.convert.head import disk_name, head_tensors, is_head_alone, sizes
from headlong.convert.reading import Source
from headlong.convert.to_gguf import gguf_entries
from headlong.errors import CheckpointError
from headlong.models import registry
from headlong.models.gguf import GgufSpec

UNPACKED = "BF16"
"""The dtype of a GGUF file's head once it is written as safetensors."""
PER_BLOCK = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.recurrent_layers",
    "feed_forward_length",
)
"""The metadata keys that may hold one value for each block."""
_NOT_KEPT = ("general.alignment", "split.")


def verbatim(info: TensorInfo, name: str | None = None) -> Entry:
    """The entry of a tensor that is copied byte for byte."""
    return Entry(name or info.name, info.dtype, info.shape, partial(copied, info))


def safetensors_head(checkpoint: Checkpoint) -> list[Entry]:
    """The entries of the head under its family's names: copied with all its parts, unless it is stored in a way of
    GGUF's or MLX's."""
    names = registry.names_of(checkpoint)
    head = {name: info for name, info in names.sources.items() if name.startswith(HEAD)}
    if any(info.file in checkpoint.gguf_layers for info in head.values()):
        if is_head_alone(checkpoint):
            raise CheckpointError(
                f"{checkpoint.folder}: holds a head alone, which is unpacked only onto its model: use `headlong graft`"
            )
        entries = safetensors_entries(Source(checkpoint), UNPACKED, UNPACKED, canonical=True)
        unpacked = (entry for entry in entries if entry.name.startswith(HEAD))
        return [replace(entry, name=disk_name(checkpoint, entry.name)) for entry in unpacked]
    return [
        _as_model(disk_name(checkpoint, name), info, names.transforms.get(name))
        for name, info in head.items()
    ]


def _as_model(name: str, info: TensorInfo, transform: Transform | None) -> Entry:
    if transform is None:
        return verbatim(info, name)

    def data() -> Tensor:
        return transform.to_model(read_tensor(info))

    return Entry(name, info.dtype, transform.model_shape(info.shape), data)


def head_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """The metadata in the header of a head's own file: which model it was made for, so that it is put onto no other."""
    return {"format": "pt"} | {field: str(value) for field, value in sizes(checkpoint).items()}


def gguf_head(checkpoint: Checkpoint, type: str) -> list[Entry]:
    """The entries of the head as the blocks of a GGUF file after the main ones: copied from a GGUF file, else
    converted, its matrices to `type`."""
    head = head_tensors(checkpoint)
    if all(info.file in checkpoint.gguf_layers for info in head.values()):
        return [verbatim(info) for info in head.values()]
    spec = gguf_spec(checkpoint)
    if not spec.runs_head:
        raise CheckpointError(
            f"{checkpoint.folder}: {no_head_beside(spec)}, or a .safetensors file for the head alone"
        )
    source = Source(checkpoint)
    entries, count = gguf_entries(source, spec, type, type), len(source.config.layer_types)
    return [entry for entry in entries if in_head(entry.name, count)]


def gguf_spec(checkpoint: Checkpoint) -> GgufSpec:
    """How the family writes GGUF files, for a checkpoint that is one or is to become one."""
    if checkpoint.is_gguf:
        return registry.find_gguf(checkpoint.metadata)[1]
    return registry.written_spec(checkpoint.config)


def no_head_beside(spec: GgufSpec) -> str:
    return (
        f"llama.cpp knows no MTP head for a {spec.arch}; name a folder, where the head lies beside the model"
    )


def head_file_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """The metadata of a GGUF file of the head alone: all but the tokenizer, which is the model's."""
    if not checkpoint.is_gguf:
        count = registry.names_of(checkpoint).head_layers
        return registry.gguf_metadata(checkpoint.config, head_layers=count) | {"general.type": "model"}
    kept = {k: v for k, v in checkpoint.metadata.items() if not k.startswith("tokenizer.")}
    return with_blocks(kept, registry.names_of(checkpoint).head_layers) | {
        f"{checkpoint.gguf_arch}.vocab_size": registry.config_of(checkpoint)["vocab_size"]
    }


def with_blocks(metadata: Mapping[str, Any], head_layers: int) -> dict[str, Any]:
    """The metadata of the same model with so many blocks of a head, or none."""
    arch, layers = metadata["general.architecture"], num_main_layers(metadata)
    found = {key: value for key, value in metadata.items() if not key.startswith(_NOT_KEPT)}
    found[f"{arch}.block_count"] = layers + head_layers
    if head_layers or f"{arch}.nextn_predict_layers" in found:
        found[f"{arch}.nextn_predict_layers"] = head_layers
    for name in PER_BLOCK:
        values = found.get(key := f"{arch}.{name}")
        if isinstance(values, list) and len(values) >= layers:
            found[key] = values[:layers] + [_of_head(name, values, layers)] * head_layers
    return found


def _of_head(name: str, values: list[Any], layers: int) -> Any:
    """The value for the head's block in a list of one value per block. The head has attention, so it takes the value of
    the blocks that do; those without attention say 0."""
    if len(values) > layers:
        return values[layers]
    return False if name.endswith("recurrent_layers") else max(values)
