"""Packs a model with GPT-QModel: `with_gptqmodel.py SOURCE OUT METHOD,FORMAT,BITS,sym|asym`, as in gptq,gptq_v2,4,asym.

What it means is what the tool's own modules, loaded from what it wrote, unpack. `awq,gemv,4,asym` is packed by the
tool's own code, too, but rounded to nearest here and written by hand: on a CPU it neither calibrates nor reads it. What
it means is known before it is packed.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it asks for two threads and on two cores has one

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear.gemv_awq import AwqGEMVLinear
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

GROUP, GEMV_GROUP = 32, 64
SMALL = ("in_proj_a", "in_proj_b")
"""Too few outputs for this layout."""
COUNT, LENGTH = 16, 128
"""Sequences that it calibrates with."""


def main(source: str, out: str, kind: str) -> None:
    method, format, bits, symmetric = kind.split(",")
    if format == "gemv":
        write_gemv(Path(source), Path(out))
        return
    how = QuantizeConfig(
        bits=int(bits), group_size=GROUP, desc_act=False, sym=symmetric == "sym", method=method, format=format,
        offload_to_disk=False, device="cpu",
    )  # fmt: skip
    model = GPTQModel.load(source, how, backend=BACKEND.TORCH)
    chance = torch.Generator().manual_seed(1)
    size = model.model.config.get_text_config().vocab_size
    tokens = torch.randint(3, size, (COUNT, LENGTH), generator=chance)
    model.quantize(
        [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens], batch_size=1
    )
    model.save(out)
    written = GPTQModel.load(out, backend=BACKEND.TORCH, device="cpu")
    found = {}
    for name, module in written.model.named_modules():
        if hasattr(module, "qweight"):
            weight = module.dequantize_weight().float()
            found[f"{name}.weight"] = weight.t().contiguous()
    save_file(found, Path(out) / "meant.dequantised")


def write_gemv(source: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    stored, found = dict(model.state_dict()), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and not name.endswith(SMALL):
            weight = module.weight.data.float()
            groups = weight.unflatten(1, (-1, GEMV_GROUP))
            low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
            scales = ((high - low) / 15).clamp(min=1e-5).half().float()
            zeros = (-low / scales).round().clamp(0, 15)
            codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
            found[f"{name}.weight"] = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            plain.weight.data = found[f"{name}.weight"]
            packed = AwqGEMVLinear(4, GEMV_GROUP, False, False, module.in_features, module.out_features)
            packed.pack(plain, scales, zeros)
            del stored[f"{name}.weight"]
            stored |= {f"{name}.{part}": getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
    stored.pop("lm_head.weight", None)  # the embedding
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, out)
    config = json.loads((source / "config.json").read_text())
    says = {"quant_method": "awq", "bits": 4, "group_size": GEMV_GROUP, "zero_point": True, "version": "gemv"}
    says |= {"modules_to_not_convert": [*SMALL]}
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": says}))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, out / "model.safetensors")
    save_file(found, out / "meant.dequantised")


if __name__ == "__main__":
    main(*sys.argv[1:])
