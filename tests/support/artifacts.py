"""Tiny checkpoints shaped like published ones: their configs, names, prefixes, files and packing, random weights.

The configs of `tests/data/configs` are real ones (the GPTQ, AWQ, INT4, FP8 and MLX ones written after public
checkpoints) with small sizes and the entries of four layers. Knows how each release stores each module; of Headlong
nothing but names.
"""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headlong.checkpoint.names import Naming
from headlong.checkpoint.names import canonical as canonical_name
from headlong.models import registry
from support import deepseek_v4_files, packing, tiny
from support.tiny import Tiny

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
INDEX = "model.safetensors.index.json"
PLAIN = "bf16"
LINEARS = r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|self_attn\.[qkvo]_proj"
LATENTS = r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"
MLP = r"mlp\.(gate|up|down)_proj"
EXPERTS = r"mlp\.experts\.(\d+\.)?(gate|up|down)_proj"
SHARED = r"mlp\.shared_expert\.(gate|up|down)_proj"
PLAIN_FIELDS = (
    *("attention_bias", "use_qk_norm", "norm_topk_prob", "n_group", "topk_group", "n_shared_experts"),
    *("first_k_dense_replace", "routed_scaling_factor"),
)
"""What configs of plain families say besides sizes."""
TARGET, HEAD = r"layers\.\d+\.", r"mtp\.layers\.0\."


@dataclass(frozen=True)
class Layout:
    """Prefixes of the three parts of a checkpoint."""

    text: str = "model.language_model."
    mtp: str = "mtp."
    lm_head: str = "lm_head."
    vision: str = "model.visual."

    def disk(self, canonical: str) -> str:
        for prefix, on_disk in (("mtp.", self.mtp), ("lm_head.", self.lm_head)):
            if canonical.startswith(prefix):
                return on_disk + canonical.removeprefix(prefix)
        return self.text + canonical


MLX = Layout("language_model.model.", "language_model.mtp.", "language_model.lm_head.", "vision_tower.")


@dataclass(frozen=True)
class Release:
    """How a release stores its modules. `packs` are patterns of whole canonical modules and how those are packed, the
    first that fits; all others are bfloat16. `lies` is the pattern of modules of which the config says otherwise."""

    config: str
    packs: tuple[tuple[str, str], ...] = ()
    lies: str = "(?!)"
    apart: str = "(?!)"
    """Names of which experts are stored one by one; the others are fused."""
    layout: Layout = field(default_factory=Layout)
    more: tuple[tuple[str, float], ...] = ()
    """Scalars that stand beside modules: canonical pattern of a module and `.name`, and the value."""
    head_file: str | None = None
    """The file of the head, where the index names one."""

    @property
    def naming(self) -> Naming:
        """What its family calls the head's modules."""
        return registry.find(read_config(self.config)).naming

    def how(self, module: str) -> str:
        return next((how for pattern, how in self.packs if re.fullmatch(pattern, module)), PLAIN)


STATIC = ".input_scale"
KV_SCALES = ((rf"{TARGET}self_attn\.k_proj.k_scale", 0.03), (rf"{TARGET}self_attn\.v_proj.v_scale", 0.04))
RELEASES: dict[str, Release] = {
    name: Release(f"{name}_config.json", **options)
    for name, options in {
        "Qwen3.5-0.8B": {},
        "Qwen3.5-2B": {"layout": Layout(text="model.")},
        "Qwen3.5-4B": {},
        "Qwen3.5-9B": {},
        "Qwen--Qwen3.5-27B": {},
        "Qwen--Qwen3.5-35B-A3B": {},
        "Qwen--Qwen3.5-122B-A10B": {},
        "Qwen--Qwen3.5-397B-A17B": {"apart": ".*"},
        "GLM-4.5-Air": {"layout": Layout(text="model."), "apart": ".*"},
        "deepseek-ai--DeepSeek-V3": {
            "packs": ((f"({TARGET}|{HEAD})({LATENTS}|{MLP}|{EXPERTS}|{SHARED})", "fp8_block"),),
            # Its config names nothing that was left alone.
            "lies": rf"({TARGET}|{HEAD})mlp\.gate|{HEAD}fc",
            "layout": Layout(text="model."),
            "apart": ".*",
        },
        "XiaomiMiMo--MiMo-7B-Base": {"layout": Layout(text="model.")},
        "Qwen--Qwen3.6-27B-FP8": {
            "packs": ((f"({TARGET}|{HEAD})({LINEARS}|{MLP})", "fp8_block"),),
            "head_file": "mtp.safetensors",
        },
        "nvidia--Qwen3.6-27B-NVFP4": {
            "packs": (
                (f"{TARGET}({LINEARS})", "fp8_static"),
                (f"{TARGET}{MLP}|lm_head", "nvfp4_modelopt"),
            ),
            "more": KV_SCALES,
        },
        "nvidia--Qwen3.6-35B-A3B-NVFP4": {
            "packs": (
                (f"{TARGET}({LINEARS})", "fp8_static"),
                (f"{TARGET}({EXPERTS}|{SHARED})|lm_head", "nvfp4_modelopt"),
            ),
            "apart": ".*",
            "more": ((f"{TARGET}({EXPERTS}|{SHARED}){STATIC}", 0.01), *KV_SCALES),
        },
        "nvidia--Qwen3.5-397B-A17B-NVFP4": {
            "packs": ((f"{TARGET}{EXPERTS}", "nvfp4_modelopt"),),
            # Its list of what was left alone forgets the routers and one matrix of the head.
            "lies": rf"{TARGET}mlp\.gate|mtp\.fc",
            "apart": TARGET,
            "more": ((f"{TARGET}{EXPERTS}{STATIC}", 0.01), *KV_SCALES),
        },
        "Qwen--Qwen3.5-35B-A3B-GPTQ-Int4": {
            "packs": ((f"{TARGET}{EXPERTS}", "gptq_v1"),),
            "apart": ".*",
        },
        "AutoRound--Qwen3.6-27B-W4A16-GPTQ": {
            "packs": ((f"{TARGET}({LINEARS}|{MLP})", "gptq_v1"),),
            "lies": r"mtp\..*",
            "head_file": "model_extra_tensors.safetensors",
        },
        "AutoAWQ--Qwen3.5-27B-AWQ": {"packs": ((f"{TARGET}({LINEARS}|{MLP})", "awq"),)},
        "llm-compressor--Qwen3.5-27B-W4A16": {"packs": ((f"{TARGET}({LINEARS}|{MLP})", "int4_g32"),)},
        "mlx-community--Qwen3.5-35B-A3B-4bit": {
            "packs": (
                (rf"({TARGET}|{HEAD})mlp\.(shared_expert_)?gate", "mlx8"),
                (f"({TARGET}|{HEAD}).*|embed_tokens|lm_head|mtp.fc", "mlx4"),
            ),
            "layout": MLX,
        },
    }.items()
}
"""By the beginning of the config's file name."""


@dataclass(frozen=True)
class Artifact:
    """A folder, what it was made of and how. `made` holds the dequantised weights, not those before packing."""

    folder: Path
    release: Release
    made: Tiny
    packed: dict[str, tuple[str, tuple[int, ...]]]
    """How each module was stored, and its [out, in]."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return tiny.tensors(self.made)


def read_config(file: str) -> dict[str, Any]:
    return json.loads((CONFIGS / file).read_text())


def make(folder: Path, name: str) -> Artifact:
    release = RELEASES[name]
    config = read_config(release.config)
    made = _floats(folder / "floats", config)
    stored, meant, packed = _store(made, release)
    _load(made, meant)
    vision = {f"{release.layout.vision}blocks.0.attn.qkv.weight": torch.ones(96, 32).bfloat16()}
    _write(folder, release, stored | vision)
    for kind in ("config", "hf_quant_config"):
        source = CONFIGS / release.config.replace("_config", f"_{kind}")
        if source.exists():
            (folder / f"{kind}.json").write_text(source.read_text())
    return Artifact(folder, release, made, packed)


def _floats(folder: Path, config: dict[str, Any]) -> Tiny:
    if (kind := config["model_type"]) in tiny.FAMILIES:
        return _plain_floats(folder, kind, config)
    text = config.get("text_config", config)
    sizes = {
        key: text[key]
        for key in (*tiny.SIZES, *tiny.EXPERTS)
        if key in text and key not in ("pad_token_id", "intermediate_size")
    }
    if "intermediate_size" in text:
        sizes["intermediate_size"] = text["intermediate_size"]
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    family = "moe" if "num_experts" in text else "dense"
    rope = text["rope_parameters"]
    part = rope["partial_rotary_factor"]
    made = tiny.make(folder, family, seed=7, rotary=part, tie_word_embeddings=tied, **sizes)
    rotary_dim = int(text["head_dim"] * part)
    made.text.rotary_emb.inv_freq.copy_(rope["rope_theta"] ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
    return made


def _plain_floats(folder: Path, family: str, config: dict[str, Any]) -> Tiny:
    told: dict[str, Any] = {
        key: config[key] for key in (*tiny.FAMILIES[family].sizes, *PLAIN_FIELDS) if key in config
    }
    scaling = config.get("rope_scaling") or {"type": "default"}
    rope = {**scaling, "rope_type": scaling["type"], "rope_theta": config["rope_theta"]}
    told |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return tiny.make(folder, family, seed=7, rope=rope, **told)


def _store(made: Tiny, release: Release) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """The tensors on disk, what they mean by the names of `tiny.tensors`, and how modules were packed."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    packed: dict[str, tuple[str, tuple[int, ...]]] = {}
    naming, count = release.naming, made.text.config.num_hidden_layers
    for name, weight in tiny.tensors(made).items():
        canonical = canonical_name(name, naming, num_layers=count)
        assert isinstance(canonical, str)
        if weight.dim() == 3 and "experts" in name:
            parts, meant[name] = _experts(canonical, weight, release, packed)
        elif weight.dim() == 2:
            module = canonical.removesuffix(".weight")
            parts, meant[name] = _matrix(module, weight, release, packed)
        else:
            parts, meant[name] = _vector(canonical, weight, release)
        for part, tensor in parts.items():
            disk = naming.disk(part, count)
            stored[disk if disk.startswith("model.") else release.layout.disk(disk)] = tensor
    return stored, meant, packed


def _matrix(module: str, weight: Tensor, release: Release, packed: dict) -> tuple[dict[str, Tensor], Tensor]:
    how = release.how(module)
    packed[module] = (how, tuple(weight.shape))
    if how == PLAIN:
        half = weight.bfloat16()
        return {f"{module}.weight": half}, half.float()
    parts = packing.pack(weight, how)
    found = {f"{module}.{part}": tensor for part, tensor in parts.items()}
    for pattern, value in release.more:
        of_module, _, name = pattern.rpartition(".")
        if re.fullmatch(of_module, module):
            found[f"{module}.{name}"] = torch.tensor(value)
    return found, packing.unpacked(how, parts, tuple(weight.shape))


def _experts(
    canonical: str, weight: Tensor, release: Release, packed: dict
) -> tuple[dict[str, Tensor], Tensor]:
    """One by one, or in one tensor; fused experts that are packed are three tensors, as MLX has them."""
    stem, _, kind = canonical.rpartition(".")
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    apart = re.match(release.apart, canonical) is not None
    if not apart and release.how(f"{stem}.{names[0]}") == PLAIN:
        packed[canonical] = (PLAIN, tuple(weight.shape))
        half = weight.bfloat16()
        return {canonical: half}, half.float()
    found: dict[str, list[Tensor]] = {}
    stored: dict[str, Tensor] = {}
    meant = []
    for expert, rows in enumerate(weight):
        for name, matrix in zip(names, rows.chunk(len(names)), strict=True):
            module = f"{stem}.{expert}.{name}" if apart else f"{stem}.{name}"
            parts, value = _matrix(module, matrix, release, packed)
            meant.append(value)
            if apart:
                stored |= parts
            for part, tensor in () if apart else parts.items():
                found.setdefault(part.replace(".experts.", ".switch_mlp."), []).append(tensor)
    stored |= {part: torch.stack(tensors) for part, tensors in found.items()}
    return stored, torch.cat(meant).view(weight.shape)


def _vector(canonical: str, weight: Tensor, release: Release) -> tuple[dict[str, Tensor], Tensor]:
    half = weight.bfloat16()
    if release.layout is not MLX:
        return {canonical: half}, half.float()
    if canonical.endswith("conv1d.weight"):
        return {canonical: half.transpose(1, 2).contiguous()}, half.float()
    is_norm = "norm" in canonical and "linear_attn.norm" not in canonical
    if is_norm:
        half = (weight + 1).bfloat16()
        return {canonical: half}, half.float() - 1
    return {canonical: half}, half.float()


@torch.no_grad()
def _load(made: Tiny, meant: dict[str, Tensor]) -> None:
    assert made.head is not None
    parameters = dict(made.model.state_dict()) | made.head.tensors(made.text.config.num_hidden_layers)
    for name, value in meant.items():
        parameters[name].copy_(value)


def _write(folder: Path, release: Release, stored: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if release.head_file is None:
        metadata = {"format": "mlx" if release.layout is MLX else "pt"}
        save_file(stored, folder / "model.safetensors", metadata)
        return
    files = dict.fromkeys(stored, "model-00001-of-00001.safetensors")
    files |= {name: release.head_file for name in stored if name.startswith("mtp.")}
    for file in sorted(set(files.values())):
        save_file(
            {name: stored[name] for name in stored if files[name] == file}, folder / file, {"format": "pt"}
        )
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


@cache
def unsupported() -> tuple[str, ...]:
    """The configs of other families."""
    names = sorted(
        file.name for file in CONFIGS.glob("*_config.json") if not file.name.endswith("hf_quant_config.json")
    )
    served = {*RELEASES, *deepseek_v4_files.RELEASES}
    return tuple(name for name in names if name.removesuffix("_config.json") not in served)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends what takes longer with a `TimeoutError`, a regular expression that backtracks for ever included."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"over {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
