"""Packs a model with NVIDIA's modelopt: `with_modelopt.py SOURCE OUT CONFIG`, a name such as INT4_AWQ_CFG.

The export moves the smoothing of inputs into the norms before them and rounds the matrices behind those anew, so what
the model means is read from what was written: norms as they are, codes by the tool's own classes, where it has one for
what it writes, else code times scale. Matrices whose smoothing stayed with them must be what the tool computed with.
"""

import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

CALIBRATED = ("INT4_AWQ_CFG", "INT8_SMOOTHQUANT_CFG")
"""Those that look at activations; others would compute with what only a GPU rounds to."""
FEW = 0.001


def main(source: str, out: str, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokens = torch.arange(5, 69)[None]
    mtq.quantize(
        model, getattr(mtq, kind), forward_loop=(lambda model: model(tokens)) if kind in CALIBRATED else None
    )
    computed = _computed_with(model) if kind in CALIBRATED else {}
    export_hf_checkpoint(model, export_dir=out)
    stored: dict[str, Tensor] = {}
    for file in Path(out).glob("*.safetensors"):
        stored |= load_file(file)
    found = {name: tensor.float() for name, tensor in stored.items() if tensor.dtype == torch.bfloat16}
    for name in stored:
        module, _, part = name.rpartition(".")
        if part == "weight" and f"{module}.weight_scale" in stored:
            found[name] = _unpacked({p: stored.get(f"{module}.{p}") for p in PARTS})
            if f"{module}.pre_quant_scale" in stored:
                far = (found[name] - computed[name]).abs() > 2**-7 * computed[name].abs().max()
                assert far.float().mean() < FEW, f"{name} is not what the tool computed with"
    found = {name: tensor.contiguous() for name, tensor in found.items() if "_scale" not in name}
    save_file(found, Path(out) / "meant.dequantised")


def _computed_with(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is not None and quantizer.is_enabled:
            weight = quantizer(module.weight.detach()).float()
            factors = getattr(module.input_quantizer, "_pre_quant_scale", None)
            found[f"{name}.weight"] = weight if factors is None else weight * factors.float().view(1, -1)
    return found


PARTS = ("weight", "weight_scale", "weight_scale_2", "pre_quant_scale")


def _unpacked(parts: dict[str, Tensor | None]) -> Tensor:
    codes, scale, whole, factors = (parts[name] for name in PARTS)
    assert codes is not None and scale is not None
    if whole is not None:
        shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
        packed = NVFP4QTensor(shape, torch.float32, codes)
        weight = packed.dequantize(scale=scale, double_scale=whole, block_sizes={-1: 16})
    elif codes.dtype == torch.uint8 and scale.dtype == torch.uint8:
        packed = MXFP4QTensor(torch.Size((codes.shape[0], 2 * codes.shape[1])), torch.float32, codes)
        weight = packed.dequantize(scale=scale, block_sizes={-1: 32})
    elif codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.uint8:
        weight = MXFP8QTensor(codes.shape, torch.float32, codes).dequantize(scale=scale)
    elif codes.dtype == torch.uint8:
        # Two rows to a byte, the first in its lower half; a code is a number from -8 to 7.
        fields = torch.stack([codes & 15, codes >> 4], 1).flatten(0, 1).int()
        weight = (fields - 16 * (fields > 7)) * scale.float().repeat_interleave(
            codes.shape[1] // scale.shape[1], 1
        )
    else:
        weight = codes.float() * scale.float().view(-1, 1)
    return weight.float() if factors is None else weight.float() * factors.float().view(1, -1)


if __name__ == "__main__":
    with torch.inference_mode():
        main(*sys.argv[1:])
