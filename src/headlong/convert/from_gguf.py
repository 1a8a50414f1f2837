"""A GGUF file written as a folder of safetensors with its configs and tokenizer, everything unpacked into floats.

Gate and up of the experts become one tensor, or each expert has its own, as the family's checkpoints have them. Knows
no command line.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headlong.checkpoint.checkpoint import CONFIG, Checkpoint
from headlong.checkpoint.generation import GENERATION_CONFIG
from headlong.checkpoint.gguf_names import ROPE_FACTORS
from headlong.checkpoint.tensor_info import TORCH_DTYPES
from headlong.checkpoint.writing import Entry, replacing_folder, write_sharded
from headlong.convert.folder import write_json
from headlong.convert.reading import DOWN, EXPERTS, GATE, UP, Experts, Source
from headlong.convert.rope_factors import llama3_parameters
from headlong.convert.to_gguf import Written
from headlong.errors import CheckpointError
from headlong.models import registry
from headlong.progress import ProgressFn, silent
from headlong.text.gguf_tokenizer import write_tokenizer

TYPES = ("bf16", "f16", "f32")
_WIDE = ("_hc.", "hc_head.", ".sinks", ".position_bias")
"""Parts of the names of vectors that checkpoints have in float32."""
_DTYPE_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def from_gguf(
    checkpoint: Checkpoint,
    out: Path,
    *,
    type: str = "bf16",
    head_type: str | None = None,
    force: bool = False,
    progress: ProgressFn = silent,
) -> Written:
    """Writes `checkpoint`, a GGUF file, to the folder `out`. `head_type` is that of the head, by default `type`."""
    if not checkpoint.is_gguf:
        raise CheckpointError(f"{checkpoint.folder}: is safetensors already; name a file ending in .gguf")
    for wanted in (type, head_type or type):
        if wanted not in TYPES:
            raise CheckpointError(f"type {wanted!r}: a safetensors folder takes {', '.join(TYPES)}")
    source = Source(checkpoint)
    notes: list[str] = []
    with replacing_folder(out, force=force) as partial:
        write_json(partial / CONFIG, _config(checkpoint, source, _DTYPE_NAMES[type]))
        if generation := _generation_config(checkpoint):
            write_json(partial / GENERATION_CONFIG, generation)
        if checkpoint.metadata.get("tokenizer.ggml.model", "none") != "none":
            write_tokenizer(checkpoint.metadata, partial)
        else:
            notes.append("the file has no tokenizer: the folder takes and gives token ids only")
        entries = safetensors_entries(source, type.upper(), (head_type or type).upper())
        write_sharded(partial, entries, {"format": "pt"}, progress)
    nbytes = sum(entry.numel * TORCH_DTYPES[entry.dtype].itemsize for entry in entries)
    return Written(out, nbytes, len(entries), source.has_head, notes)


def safetensors_entries(
    source: Source, dtype: str, head_dtype: str, *, canonical: bool = False
) -> list[Entry]:
    """The entries of all tensors, under the names of their family or `canonical` ones."""
    family, num_layers = source.blueprint.family, len(source.config.layer_types)
    naming, joined = family.naming, {} if family.gguf is None else family.gguf.names.joined

    def disk_name(name: str) -> str:
        disk = name if canonical else naming.disk(name, num_layers)
        bare = canonical or not naming.modules
        return f"model.{disk}" if bare and not disk.startswith(("mtp.", "lm_head.", "model.")) else disk

    entries = []
    for name, shape in source.shapes.items():
        if name == ROPE_FACTORS:
            continue  # said in the config
        wanted = head_dtype if name.startswith("mtp.") else dtype
        prefix, _, projection = name.removesuffix(".weight").rpartition(".")
        if source.is_table(name):
            entries.append(Entry(disk_name(name), "I64", shape, partial(source.table, name)))
        elif projection in joined:
            parts = [disk_name(f"{prefix}.{part}.weight") for part in joined[projection]]
            entries += _taken_apart(source, name, parts, wanted)
        elif EXPERTS not in name:
            stays = source.is_vector(name) and any(part in name for part in _WIDE)
            entries.append(Entry(disk_name(name), "F32" if stays else wanted, shape, _data(source, name)))
        elif naming.modules:
            entries += _one_by_one(source, Experts(prefix, projection), disk_name, wanted)
        elif (entry := _experts(source, name, wanted)) is not None:
            entries.append(replace(entry, name=disk_name(entry.name)))
    return entries


def _experts(source: Source, name: str, dtype: str) -> Entry | None:
    """What becomes of a tensor of experts, by its canonical name: gates and ups become one."""
    prefix, projection, kind = name.rsplit(".", 2)
    if projection == UP:
        return None
    projections = (GATE, UP) if projection == GATE else (DOWN,)
    fused = f"{prefix}.{'gate_up_proj' if projection == GATE else DOWN}{'' if kind == 'weight' else '_bias'}"
    stored = source.blueprint.family.naming.stored(fused)
    count, rows, *columns = source.shapes[name]
    shape = stored.disk_shape((count, rows * len(projections), *columns))

    def biases() -> Tensor:
        return stored.to_disk(torch.cat([source.vector(Experts(prefix, own).bias) for own in projections], 1))

    def matrices() -> Iterator[Tensor]:
        both = (source.read_experts(Experts(prefix, own)) for own in projections)
        for parts in zip(*both, strict=True):
            yield stored.to_disk(torch.cat([tile for part in parts for tile in part])[None])[0]

    return Entry(fused, dtype, shape, matrices if kind == "weight" else biases)


def _one_by_one(
    source: Source, experts: Experts, disk_name: Callable[[str], str], dtype: str
) -> Iterator[Entry]:
    """The entries of each expert's own matrix. They are written in this order, so that one pass over the experts gives
    them all."""
    count, *shape = source.shapes[experts.name]
    stream = source.read_experts(experts)
    for expert in range(count):
        name = disk_name(f"{experts.prefix}.{expert}.{experts.projection}.weight")
        yield Entry(name, dtype, tuple(shape), partial(next, stream))


def _taken_apart(source: Source, name: str, parts: list[str], dtype: str) -> Iterator[Entry]:
    """The entries of matrices that lie side by side in one."""
    out_features, in_features = source.shapes[name]
    size = in_features // len(parts)
    for number, part in enumerate(parts):
        columns = slice(number * size, (number + 1) * size)
        yield Entry(part, dtype, (out_features, size), partial(_columns, source, name, columns))


def _columns(source: Source, name: str, columns: slice) -> Iterator[Tensor]:
    for tile in source.read_float(name):
        yield tile[:, columns]


def _data(source: Source, name: str) -> Any:
    return (lambda: source.vector(name)) if source.is_vector(name) else (lambda: source.read_float(name))


def _config(checkpoint: Checkpoint, source: Source, dtype: str) -> dict[str, Any]:
    described = registry.config_of(checkpoint)
    config = {key: value for key, value in described.items() if key != "linear_value_heads_tiled"}
    config["dtype"] = dtype
    if source.has_head:  # which may have lain beside a file that does not know of it
        config |= source.blueprint.family.mtp.config_fields(source.head_layers)
    if ROPE_FACTORS in source.shapes:
        factors = source.vector(ROPE_FACTORS)
        scaling = llama3_parameters(factors, source.config.rope_theta, source.config.rotary_dim)
        config["rope_parameters"] = config["rope_parameters"] | scaling
    return config


def _generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    config = registry.config_of(checkpoint)
    return {key: config[key] for key in ids if key in config} | checkpoint.generation_config
