"""Packs a model with llmcompressor by rounding to nearest: `with_llmcompressor.py SOURCE OUT SCHEME[:raw]`.

`raw` saves it uncompressed. What it means is what compressed-tensors itself unpacks.
"""

import sys
from pathlib import Path

import torch
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig


def main(source: str, out: str, kind: str) -> None:
    scheme, _, raw = kind.partition(":")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
    model.save_pretrained(out, save_compressed=not raw)
    found = {}
    if raw:
        for name, module in model.named_modules():
            if (scheme := getattr(module, "quantization_scheme", None)) is not None:
                zeros = getattr(module, "weight_zero_point", None)
                weight = fake_quantize(module.weight.data, module.weight_scale, zeros, scheme.weights)
                found[f"{name}.weight"] = weight.float().contiguous()
    else:
        unpacking = CompressedTensorsConfig(run_compressed=False)
        whole = AutoModelForCausalLM.from_pretrained(out, quantization_config=unpacking, dtype=torch.float32)
        for name, module in whole.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                found[f"{name}.weight"] = module.weight.data.float().contiguous()
    save_file(found, Path(out) / "meant.dequantised")


if __name__ == "__main__":
    main(*sys.argv[1:])
