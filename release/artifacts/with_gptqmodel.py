"""Packs a model with GPT-QModel: `with_gptqmodel.py SOURCE OUT METHOD,FORMAT,BITS,sym|asym`, as in gptq,gptq_v2,4,asym.

What it means is what the tool's own modules, loaded from what it wrote, unpack.
"""

import os
import sys
from pathlib import Path

import torch

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it asks for two threads and on two cores has one

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import save_file

COUNT, LENGTH = 16, 128
"""Sequences that it calibrates with."""


def main(source: str, out: str, kind: str) -> None:
    method, format, bits, symmetric = kind.split(",")
    how = QuantizeConfig(
        bits=int(bits), group_size=32, desc_act=False, sym=symmetric == "sym", method=method, format=format,
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


if __name__ == "__main__":
    main(*sys.argv[1:])
