"""An MTP head apart from its model: found in any artifact, described by its sizes, and put onto another model.

Everything here works on tables of tensors: only headers are read and nothing is written. Knows names and sizes; how a
head is stored in which container is in `head_entries`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.detect import HEAD
from headlong.checkpoint.load import Expectations
from headlong.checkpoint.safetensors import read_file
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.errors import CheckpointError, HeadError
from headlong.layers.weights import Scope
from headlong.models import registry
from headlong.ops.registry import choose_backend

MODEL_TYPE, LAYERS = "model_type", "num_hidden_layers"
SIZES = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""What must agree between a head and its model, in the spelling of config.json."""


def open_artifact(path: Path, like: Checkpoint | None = None) -> Checkpoint:
    """Opens a checkpoint, or the safetensors file of a head alone, whose config is then made from the file's metadata.
    A file without such metadata, as a shard is, names its tensors as the model `like` does, if there is one."""
    if path.suffix != ".safetensors" or not path.is_file():
        return Checkpoint.open(path)
    tensors, metadata = read_file(path)
    whole = Checkpoint(
        folder=path,
        config=_told(metadata) or ({} if like is None else _naming_fields(like)),
        generation_config={},
        tensors=tensors,
        mlx_files=frozenset({path} if metadata.get("format") == "mlx" else ()),
    )
    # In the shard of a model the head's tensors are those that say so; in a file of its own all may be.
    named = {info.name: info for info in head_tensors(whole).values()}
    return replace(whole, tensors=named or tensors, sidecars=frozenset({path}))


def _told(metadata: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {field: metadata.get(field) for field in SIZES}
    told = {name: int(text) for name, text in numbers.items() if isinstance(text, str) and text.isdecimal()}
    return told | ({MODEL_TYPE: kind} if isinstance(kind := metadata.get(MODEL_TYPE), str) else {})


def _naming_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """What of a model's config decides what its tensors are called."""
    config = registry.config_of(checkpoint)
    found = {MODEL_TYPE: config.get(MODEL_TYPE), LAYERS: config.get("text_config", config).get(LAYERS)}
    return {name: value for name, value in found.items() if value is not None}


def disk_name(checkpoint: Checkpoint, name: str) -> str:
    """What safetensors call a tensor of the checkpoint's head; its canonical `name` where no family is known."""
    told = _naming_fields(checkpoint)
    family, count = registry.FAMILIES.get(str(told.get(MODEL_TYPE))), told.get(LAYERS)
    return name if family is None or type(count) is not int else family.naming.disk(name, count)


def head_tensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Every tensor of the head by canonical name; empty where there is none."""
    return {
        name: info for name, info in registry.names_of(checkpoint).sources.items() if name.startswith(HEAD)
    }


def all_of_head(checkpoint: Checkpoint) -> set[TensorInfo]:
    """Every tensor on disk that is the head's, with copies of its target's that nobody reads."""
    names = registry.names_of(checkpoint)
    return set(head_tensors(checkpoint).values()) | {copy for _, copy in names.copies}


def require_head(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    found = head_tensors(checkpoint)
    if not found:
        raise HeadError(f"{checkpoint.folder}: has no MTP head (no tensor named {HEAD}*)")
    return found


def is_head_alone(checkpoint: Checkpoint) -> bool:
    """True if the checkpoint holds a head and no model."""
    return all(name.startswith(HEAD) for name in registry.names_of(checkpoint).sources)


def without_head(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without the head's tensors."""
    head = all_of_head(checkpoint)
    kept = {name: info for name, info in checkpoint.tensors.items() if info not in head}
    files = {info.file for info in kept.values()}
    return replace(checkpoint, tensors=kept, sidecars=checkpoint.sidecars & files)


def joined(base: Checkpoint, head: Checkpoint) -> Checkpoint:
    """The model of `base` with the head of `head` in place of any of its own, as one table."""
    bare = without_head(base)
    added = {info.name: info for info in require_head(head).values()}
    if both := sorted(added.keys() & bare.tensors.keys()):
        raise CheckpointError(f"{head.folder}: its head has a tensor {both[0]!r}, and so has {base.folder}")
    files = {info.file for info in added.values()}
    layers = {file: count for file, count in head.gguf_layers.items() if file in files}
    # A GGUF head beside safetensors is named by its own architecture; there is no other.
    metadata = base.metadata or ({"general.architecture": head.gguf_arch} if layers else {})
    return replace(
        bare,
        tensors=bare.tensors | added,
        sidecars=bare.sidecars | (head.sidecars & files),
        gguf_layers={**bare.gguf_layers, **layers},
        mlx_files=bare.mlx_files | (head.mlx_files & files),
        metadata=metadata,
    )


def sizes(checkpoint: Checkpoint) -> dict[str, str | int]:
    """The family and the sizes a head is made for, as far as they are known."""
    if checkpoint.folder.suffix == ".safetensors":
        return dict(checkpoint.config)
    config = registry.read_config(registry.config_of(checkpoint))
    attention, moe = config.attention, config.moe
    found: dict[str, str | int] = {
        MODEL_TYPE: config.model_type,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": len(config.layer_types),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
    }
    if moe is None:
        return found | {"intermediate_size": config.intermediate_size}
    return found | {
        "num_experts": moe.num_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "shared_expert_intermediate_size": moe.shared_intermediate_size,
    }


def check_fits(base: Checkpoint, head: Checkpoint) -> None:
    """Raises one sentence where `head` was made for a model of another kind or of other sizes than `base`.

    Sizes that a lone file does not tell are read off its tensors.
    """
    wanted, given = sizes(base), sizes(head)
    in_gguf = bool(base.gguf_layers or head.gguf_layers)
    ours, theirs = (_family(found.get(MODEL_TYPE), in_gguf=in_gguf) for found in (wanted, given))
    if theirs is not None and ours != theirs:
        raise HeadError(
            f"{head.folder}: is the head of a {theirs} model, but {base.folder} is a {ours} model; "
            "a head fits only the model it was made for"
        )
    for field in SIZES:
        if field in given and given[field] != wanted.get(field):
            raise HeadError(
                f"{head.folder}: its head is made for {field} {given[field]}, but {base.folder} has "
                f"{wanted.get(field, 'none')}; a head fits only the model it was made for"
            )
    _check_shapes(base, head)


def _family(model_type: object, *, in_gguf: bool) -> str | None:
    """What heads are told apart by; GGUF files tell architectures, which several families may share."""
    family = registry.FAMILIES.get(str(model_type))
    if in_gguf and family is not None and family.gguf is not None:
        return family.gguf.arch
    return model_type.removesuffix("_text") if isinstance(model_type, str) else None


def _check_shapes(base: Checkpoint, head: Checkpoint) -> None:
    names = registry.names_of(joined(base, head))
    config = registry.config_of(base)
    family, needs = registry.find(config), Expectations(names)
    scope = Scope(needs, choose_backend(torch.float32, torch.device("meta")), HEAD)
    family.head(family.config(config), scope, names.head_layers)
    for name, need in needs.expected.items():
        info = names.sources.get(name)
        if info is None or not info.is_float:
            continue  # packed or missing: the survey of the whole tells
        transform = names.transforms.get(name)
        shape = info.shape if transform is None else transform.model_shape(info.shape)
        if shape != need.shape:
            raise HeadError(
                f"{head.folder}: tensor {name!r} of its head is {list(shape)}, but {base.folder} needs "
                f"{list(need.shape)}; a head fits only the model it was made for"
            )
