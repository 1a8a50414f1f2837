"""Tiny models with their matrices packed into any format, the head alike, otherwise or not at all."""

from collections.abc import Callable

import torch

from headlong.checkpoint.names import canonical
from headlong.models.registry import FAMILIES
from support import tiny
from support.packing import hint_of, pack, unpacked

LEFT_ALONE = (
    "embed_tokens",
    "lm_head",
    "shared_head.head",
    "in_proj_a",
    "in_proj_b",
    "mlp.gate.",
    "shared_expert_gate",
    "conv1d",
)


def is_packable(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and not any(part in name for part in LEFT_ALONE)


def packed(
    weights: dict,
    target: str | None,
    head: str | None,
    is_head: Callable[[str], bool] = lambda name: name.startswith("mtp."),
) -> tuple[dict, dict]:
    """The tensors on disk, and the floats they stand for; None leaves a part in bfloat16."""
    stored, meant = {}, {}
    for name, weight in weights.items():
        how = head if is_head(name) else target
        if how is None or not is_packable(name, weight):
            stored[name] = weight.bfloat16()
            meant[name] = stored[name].float()
            continue
        parts = pack(weight, how)
        stem = name.removesuffix("weight")
        stored |= {stem + part: tensor for part, tensor in parts.items()}
        meant[name] = unpacked(how, parts, tuple(weight.shape))
    return stored, meant


def write(folder, made, weights: dict) -> None:
    tiny.write(folder, tiny.read_config(made.folder), {k: w.contiguous() for k, w in weights.items()})


def quant_config(how: str) -> dict:
    said = hint_of(how)
    if "weights" in said:
        group = {"targets": ["Linear"], **said}
        return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    if how.startswith("quark"):
        weight = {"weight": {"dtype": said["dtype"]}}
        return {
            "quant_method": "quark",
            "global_quant_config": weight,
            "export": {"pack_method": said["pack_method"]},
        }
    return {"quant_method": "gptq"} | said if said else {}


def write_packed(folder, made, target: str | None, head: str | None, experts: str = "fused") -> dict:
    """Writes the packed model and returns the floats it stands for."""
    config = tiny.read_config(made.folder)
    stored, meant = packed(tiny.tensors(made, experts), target, head, head_of(config))
    if extra := quant_config(target or "") or quant_config(head or ""):
        config["quantization_config"] = extra
    folder.mkdir(parents=True, exist_ok=True)
    tiny.write(folder, config, {k: w.contiguous() for k, w in stored.items()})
    return meant


def head_of(config: dict) -> Callable[[str], bool]:
    """Tells of a name on disk whether it is the head's."""
    naming, count = FAMILIES[config["model_type"]].naming, config.get("num_hidden_layers", 0)

    def is_head(name: str) -> bool:
        found = canonical(name, naming, num_layers=count)
        return isinstance(found, str) and found.startswith("mtp.")

    return is_head
