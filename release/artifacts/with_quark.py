"""Packs a model with AMD's Quark by one of its schemes: `with_quark.py SOURCE OUT SCHEME`, such as uint4_wo_32 or fp8.

What it means is what the tool's own reader makes of what it wrote.
"""

import sys
from pathlib import Path

import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main(source: str, out: str, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    template = LLMTemplate.get("qwen3_5")
    how = template.get_config(scheme=kind, exclude_layers=["lm_head"])
    quantizer = ModelQuantizer(how)
    data = torch.utils.data.DataLoader(torch.arange(5, 69)[None], batch_size=1)
    model = quantizer.freeze(quantizer.quantize_model(model, data))
    export_safetensors(model, out)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    read = import_model_from_safetensors(plain, model_dir=out)
    found = {}
    for name, module in read.named_modules():
        if (quantizer := getattr(module, "weight_quantizer", None)) is not None:
            found[f"{name}.weight"] = quantizer(module.weight).float().contiguous()
    save_file(found, Path(out) / "meant.dequantised")


if __name__ == "__main__":
    main(*sys.argv[1:])
