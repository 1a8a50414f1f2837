"""Packs a model with AutoRound by rounding to nearest: `with_auto_round.py SOURCE OUT FORMAT,BITS,sym|asym`."""

import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: str, out: str, kind: str) -> None:
    format, bits, symmetric = kind.split(",")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    rounding = AutoRound(
        model, tokenizer, bits=int(bits), group_size=32, sym=symmetric == "sym", iters=0, device_map="cpu"
    )
    rounding.quantize()
    found = {f"{name}.weight": model.get_submodule(name).weight.data.float().clone() for name in names}
    rounding.save_quantized(out, format=format, inplace=True)
    save_file(found, Path(out) / "meant.dequantised")


if __name__ == "__main__":
    main(*sys.argv[1:])
