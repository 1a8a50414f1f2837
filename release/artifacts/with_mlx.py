"""Packs a model with mlx-lm on the CPU: `with_mlx.py SOURCE OUT affine4|affine3|mxfp4|mxfp8|nvfp4`."""

import json
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import convert
from mlx_lm.utils import load_model

KINDS = {
    "affine4": ("affine", 4, 64),
    "affine3": ("affine", 3, 32),
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "nvfp4": ("nvfp4", 4, 16),
}

NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")


def main(source: str, out: str, kind: str) -> None:
    mode, bits, group = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        for file in Path(source).absolute().iterdir():
            if file.name != "config.json":
                (Path(folder) / file.name).symlink_to(file)
        # mlx-lm knows the model as the text part of a larger one.
        text = json.loads((Path(source) / "config.json").read_text())
        whole = {
            "model_type": "qwen3_5",
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": text,
        }
        (Path(folder) / "config.json").write_text(json.dumps(whole))
        convert(folder, mlx_path=out, quantize=True, q_mode=mode, q_bits=bits, q_group_size=group)
    model, _ = load_model(Path(out))
    found = {}
    for name, module in model.named_modules():
        if name.endswith(NORMS):
            # MLX adds 1 and rounds that.
            found[f"{name}.weight"] = module.weight.astype(mx.float32) - 1
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            scales, biases = module.scales, getattr(module, "biases", None)
            if biases is not None:
                # In float32, as MLX multiplies: in bfloat16 code times scale would be rounded before the bias is added.
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            weight = mx.dequantize(module.weight, scales, biases, **how)
            found[f"{name}.weight"] = weight.astype(mx.float32)
    mx.save_safetensors(str(Path(out) / "meant.safetensors"), found)
    (Path(out) / "meant.safetensors").rename(Path(out) / "meant.dequantised")


if __name__ == "__main__":
    main(*sys.argv[1:])
