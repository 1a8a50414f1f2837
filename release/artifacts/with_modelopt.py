"""Packs a model with NVIDIA's modelopt: `with_modelopt.py SOURCE OUT CONFIG`, a name such as INT4_AWQ_CFG."""

import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main(source: str, out: str, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokens = torch.arange(5, 69)[None]
    mtq.quantize(model, getattr(mtq, kind), forward_loop=lambda model: model(tokens))
    found = {}
    for name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is not None and quantizer.is_enabled:
            weight = quantizer(module.weight.detach()).float()
            factors = getattr(module.input_quantizer, "_pre_quant_scale", None)
            found[f"{name}.weight"] = weight if factors is None else weight * factors.float().view(1, -1)
    export_hf_checkpoint(model, export_dir=out)
    # Where the export moved a smoothing into the norm before, a matrix means something else than it did.
    with safe_open(Path(out) / "model.safetensors", "pt") as stored:
        names = list(stored.keys())
    scaled = {name.replace(".pre_quant_scale", ".weight") for name in names if "pre_quant" in name}
    found = {name: weight for name, weight in found.items() if not scaled or name in scaled}
    save_file({name: weight.contiguous() for name, weight in found.items()}, Path(out) / "meant.dequantised")


if __name__ == "__main__":
    with torch.inference_mode():
        main(*sys.argv[1:])
