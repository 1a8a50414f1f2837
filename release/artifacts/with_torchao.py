"""Packs a model with torchao through transformers: `with_torchao.py SOURCE OUT int8|intx4|intx4_asym|fp8|int4`."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
)
from torchao.quantization.quant_primitives import MappingType
from transformers import AutoModelForCausalLM, TorchAoConfig

GROUP = PerGroup(32)
KINDS = {
    "int8": lambda: Int8WeightOnlyConfig(version=2),
    "intx4": lambda: IntxWeightOnlyConfig(torch.int4, GROUP, version=2),
    "intx4_asym": lambda: IntxWeightOnlyConfig(torch.int4, GROUP, MappingType.ASYMMETRIC, version=2),
    "fp8": lambda: Float8WeightOnlyConfig(version=2),
    "int4": lambda: Int4WeightOnlyConfig(group_size=32, version=2),
}


def main(source: str, out: str, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=TorchAoConfig(KINDS[kind]()), device_map="cpu", dtype=torch.bfloat16
    )
    model.save_pretrained(out)
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Linear) and hasattr(weight, "dequantize"):
            found[f"{name}.weight"] = weight.dequantize().float().contiguous()
    save_file(found, Path(out) / "meant.dequantised")


if __name__ == "__main__":
    main(*sys.argv[1:])
