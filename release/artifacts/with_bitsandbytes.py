"""Packs a model with bitsandbytes through transformers: `with_bitsandbytes.py SOURCE OUT nf4|nested|fp4|int8`."""

import sys
from pathlib import Path

import bitsandbytes
import torch
from bitsandbytes import functional
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def dequantised(module: torch.nn.Module) -> torch.Tensor | None:
    if isinstance(module, bitsandbytes.nn.Linear4bit):
        state = module.weight.quant_state
        state.dtype = torch.float32
        return functional.dequantize_4bit(module.weight.data, state)
    if isinstance(module, bitsandbytes.nn.Linear8bitLt):
        return functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    return None


def main(source: str, out: str, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=BitsAndBytesConfig(**KINDS[kind]), device_map="cpu", dtype=torch.bfloat16
    )
    model.save_pretrained(out)
    found = {f"{name}.weight": dequantised(module) for name, module in model.named_modules()}
    save_file(
        {name: weight.float() for name, weight in found.items() if weight is not None},
        Path(out) / "meant.dequantised",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
