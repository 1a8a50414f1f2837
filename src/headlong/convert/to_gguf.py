"""A checkpoint written as one GGUF file that llama.cpp reads, the MTP head as the block after the layers, or in a file
beside it where llama.cpp wants it there.

Decides what is stored in which type; names, values and metadata are told by `checkpoint`. Knows no command line.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import LlamaFileType
from torch import Tensor

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.gguf_config import sampling_metadata
from headlong.checkpoint.gguf_names import ROPE_FACTORS, GgufNames, in_head, name_in_file
from headlong.checkpoint.gguf_writing import block_elements, gguf_nbytes, write_gguf
from headlong.checkpoint.strict_json import read_object
from headlong.checkpoint.writing import Entry, replacing
from headlong.convert import latent
from headlong.convert.reading import Source
from headlong.errors import CheckpointError
from headlong.layers.latent_attention import LatentAttentionConfig
from headlong.models import registry
from headlong.models.gguf import GgufSpec
from headlong.ops.rope.scaling import Llama3Scaling, YarnScaling
from headlong.progress import ProgressFn, silent
from headlong.small_files import read_text
from headlong.text.gguf_tokenizer import gguf_tokenizer_fields
from headlong.text.tokenizer import MAX_COMPANION_BYTES

log = logging.getLogger(__name__)
TYPES = ("bf16", "f16", "f32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
WHOLE = (
    *(".ssm_conv1d.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight"),
    *(".hc_attn_fn.weight", ".hc_ffn_fn.weight", "output_hc_fn.weight", "compressor_ape.weight"),
)
"""Matrices that llama.cpp wants in float32, besides all vectors: convolutions, the routers of experts, connections of
residual streams, and biases by position."""
WIDE = ("token_embd.weight", "output.weight")
"""Matrices that are stored in at least eight bits: they are used for every token, and narrower ones lose more than they
save."""
OF_BOTH = ("token_embd.weight", "output_norm.weight", "output.weight")
"""What a file of the head alone repeats of its model."""
QUANTIZATION_VERSION = 2
MXFP4 = "MXFP4"
"""The type of experts that are stored in such floats, whatever the other matrices become: nothing is lost."""
YARN_BETAS = (32.0, 1.0)


@dataclass(frozen=True)
class Written:
    """What was written. `notes` are sentences that a person should see."""

    path: Path
    nbytes: int
    num_tensors: int
    has_head: bool
    notes: list[str] = field(default_factory=list)


def to_gguf(
    checkpoint: Checkpoint,
    out: Path,
    *,
    type: str = "bf16",
    head_type: str | None = None,
    force: bool = False,
    progress: ProgressFn = silent,
) -> Written:
    """Writes `checkpoint` to the file `out`. `head_type` is that of the head's matrices, by default `type`."""
    if checkpoint.is_gguf:
        raise CheckpointError(f"{checkpoint.folder}: is GGUF already; name a folder to write safetensors")
    spec = registry.written_spec(checkpoint.config)
    source = Source(checkpoint)
    notes: list[str] = []
    entries = gguf_entries(source, spec, type, head_type or type)
    if spec.head_apart and source.has_head:
        return _apart(checkpoint, source, spec, entries, out, type, force, progress)
    metadata = _metadata(checkpoint, spec.arch, source.head_layers, type, notes)
    if source.has_head and not spec.runs_head:
        notes.append(
            f"llama.cpp reads no MTP head beside a {spec.arch} and will refuse this file; Headlong reads it"
        )
    scaling = source.config.rope_scaling
    if isinstance(scaling, YarnScaling) and (scaling.beta_fast, scaling.beta_slow) != YARN_BETAS:
        notes.append(
            "llama.cpp takes beta_fast 32 and beta_slow 1 for YaRN, whatever the file says, and its answers will "
            f"differ: this model has {scaling.beta_fast:g} and {scaling.beta_slow:g}; Headlong reads them"
        )
    delta_net = source.config.delta_net
    if delta_net is not None and delta_net.key_dim != delta_net.value_dim:
        notes.append(
            "llama.cpp reads DeltaNet heads of one size only and will refuse this file; Headlong reads it"
        )
    with replacing(out, force=force) as partial:
        write_gguf(partial, metadata, entries, progress)
    nbytes = sum(gguf_nbytes(entry) for entry in entries)
    return Written(out, nbytes, len(entries), source.has_head, notes)


def _apart(
    checkpoint: Checkpoint,
    source: Source,
    spec: GgufSpec,
    entries: list[Entry],
    out: Path,
    type: str,
    force: bool,
    progress: ProgressFn,
) -> Written:
    """The model in one file and its head in another."""
    count, beside, notes = len(source.config.layer_types), out.with_name(f"mtp-{out.name}"), []
    head = head_file_entries(entries, count)
    main = [entry for entry in entries if not in_head(entry.name, count)]
    with replacing(out, force=force) as partial, replacing(beside, force=force) as partial_head:
        write_gguf(partial, _metadata(checkpoint, spec.arch, 0, type, notes), main, progress)
        metadata = _metadata(checkpoint, spec.arch, source.head_layers, type, [])
        write_gguf(partial_head, metadata, head, progress, "write head")
    notes.append(f"the MTP head is in {beside.name}, where llama.cpp and Headlong look for it")
    nbytes = sum(gguf_nbytes(entry) for entry in (*main, *head))
    return Written(out, nbytes, len(main) + len(head), True, notes)


def head_file_entries(entries: list[Entry], num_layers: int) -> list[Entry]:
    """The entries of a file of the head alone, out of those of a model with its head: llama.cpp asks for the embedding,
    the last norm and the lm_head there, too."""
    found = [entry for entry in entries if entry.name in OF_BOTH]
    return found + [
        replace(entry, name=name_in_file(entry.name, num_layers))
        for entry in entries
        if in_head(entry.name, num_layers)
    ]


def gguf_entries(source: Source, spec: GgufSpec, type: str, head_type: str) -> list[Entry]:
    num_layers = len(source.config.layer_types)
    entries, unknown = [], []
    for name, stored, data in _tensors(source, spec):
        wanted = head_type if name.startswith("mtp.") else type
        if (parts := _joined(spec.names, name)) is not None:
            if name == parts[1]:
                entries.append(_side_by_side(source, spec, parts, wanted))
            continue
        disk_name = spec.names.disk(name, num_layers)
        if disk_name is None:
            unknown.append(name)
            continue
        if source.is_table(name):
            entries.append(Entry(disk_name, "I32", stored, partial(_table, source, name)))
            continue
        dtype = MXFP4 if source.stays_mxfp4(name) else storage_type(disk_name, stored, wanted.upper())
        entries.append(Entry(disk_name, dtype, stored, data))
    if unknown:
        raise CheckpointError(f"GGUF has no place for {', '.join(unknown)}")
    config = source.config
    if isinstance(config.rope_scaling, Llama3Scaling) and ROPE_FACTORS not in source.shapes:
        factors = config.rope_scaling.factors(config.rope_theta, config.rotary_dim).float()
        entries.append(Entry(ROPE_FACTORS, "F32", tuple(factors.shape), lambda: factors))
    return entries


def _tensors(source: Source, spec: GgufSpec) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Canonical names, stored shapes and data of what a file has."""
    for name, shape in source.shapes.items():
        if source.config.latent is not None and latent.is_expanding(name):
            yield from _halves(source, name, source.config.latent)
        else:
            yield name, spec.names.transform(name).disk_shape(shape), _data(source, name, spec)


def _halves(
    source: Source, name: str, config: LatentAttentionConfig
) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    named = zip(latent.half_names(name), latent.half_shapes(config), strict=True)
    for place, (half, shape) in enumerate(named):
        yield half, shape, lambda place=place: iter(latent.halves(source.read_float(name), config)[place])


def _joined(names: GgufNames, name: str) -> tuple[str, ...] | None:
    """For one of two matrices that GGUF has side by side: the canonical name of both together, and theirs."""
    prefix, _, module = name.removesuffix(".weight").rpartition(".")
    for whole, parts in names.joined.items():
        if module in parts:
            return tuple(f"{prefix}.{each}.weight" for each in (whole, *parts))
    return None


def _side_by_side(source: Source, spec: GgufSpec, names: tuple[str, ...], type: str) -> Entry:
    whole, *parts = names
    disk_name = spec.names.disk(whole, len(source.config.layer_types))
    assert disk_name is not None
    shapes = [source.shapes[part] for part in parts]
    shape = (shapes[0][0], sum(shape[1] for shape in shapes))

    def data() -> Iterator[Tensor]:
        for tiles in zip(*(source.read_float(part) for part in parts), strict=True):
            yield torch.cat(tiles, 1)

    return Entry(disk_name, storage_type(disk_name, shape, type.upper()), shape, data)


def _table(source: Source, name: str) -> Tensor:
    return source.table(name).to(torch.int32).view(torch.uint8)


def _data(source: Source, name: str, spec: GgufSpec) -> Any:
    order = spec.order(name, source.config).inverse()
    stored = spec.names.transform(name)
    if source.stays_mxfp4(name):
        return lambda: source.read_mxfp4(name)
    if source.is_vector(name):
        return lambda: stored.to_disk(source.vector(name, order))
    return lambda: (stored.to_disk(tile) for tile in source.read_float(name, order))


def storage_type(disk_name: str, shape: tuple[int, ...], wanted: str) -> str:
    """The type in which one tensor is stored where matrices are to have the type `wanted`."""
    if len(shape) == 1 or disk_name.endswith(WHOLE) or not disk_name.endswith(".weight"):
        return "F32"
    if wanted.startswith("Q") and disk_name in WIDE:
        wanted = "Q8_0"
    return "F16" if shape[-1] % block_elements(wanted) else wanted


def _metadata(
    checkpoint: Checkpoint, arch: str, head_layers: int, type: str, notes: list[str]
) -> dict[str, Any]:
    file_type = LlamaFileType.ALL_F32 if type == "f32" else LlamaFileType[f"MOSTLY_{type.upper()}"]
    sizes = registry.gguf_metadata(checkpoint.config, head_layers=head_layers)
    return {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": checkpoint.folder.absolute().name,
        "general.file_type": int(file_type),
        "general.quantization_version": QUANTIZATION_VERSION,
        **sampling_metadata(checkpoint.generation_config),
        **{key: value for key, value in sizes.items() if key != "general.architecture"},
        **_tokenizer(checkpoint, sizes[f"{arch}.vocab_size"], notes),
    }


def _tokenizer(checkpoint: Checkpoint, vocab_size: int, notes: list[str]) -> dict[str, Any]:
    folder = checkpoint.folder
    fields: dict[str, Any] = {"tokenizer.ggml.model": "none"}
    if (folder / "tokenizer.json").exists():
        fields = gguf_tokenizer_fields(
            read_object(folder / "tokenizer.json"), _tokenizer_config(folder), vocab_size
        )
    else:
        notes.append(f"{folder} has no tokenizer.json: the file takes and gives token ids only")
    ends = checkpoint.generation_config.get("eos_token_id", _text(checkpoint).get("eos_token_id"))
    ids = ends if isinstance(ends, list) else [ends]
    first = fields.get("tokenizer.ggml.eos_token_id")
    for token in ids:
        if not isinstance(token, int) or token == first:
            continue
        if first is None:
            fields["tokenizer.ggml.eos_token_id"] = first = token
        else:
            fields.setdefault("tokenizer.ggml.eot_token_id", token)
    return fields


def _text(checkpoint: Checkpoint) -> Mapping[str, Any]:
    return checkpoint.config.get("text_config", checkpoint.config)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_object(path) if path.exists() else {}
    if template.exists():
        try:
            config["chat_template"] = read_text(template, MAX_COMPANION_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{template}: cannot be read as UTF-8 text ({error})") from error
    return config
