"""Float matrices packed into every on-disk format, and the slow way back, both from the formats' definitions.

`pack` gives the tensors of one module by their suffixes; `unpacked` what they mean, with codes read one by one and
only the last formula in float32 arrays. Knows of Headlong only how a header describes a tensor.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headlong.quant.format import Part
from support.packing_bits import Parts
from support.packing_floats import (
    fp8_block,
    fp8_channel,
    fp8_e5m2,
    fp8_powers,
    fp8_tensor,
    mx,
    mxfp4_deepseek,
    nvfp4,
    nvfp4_mlx,
    read_fp8,
    read_fp8_powers,
    read_mx,
    read_mxfp4_deepseek,
    read_nvfp4,
    read_nvfp4_mlx,
    read_unrounded_fp8,
    static,
    unrounded_fp8,
)
from support.packing_ints import (
    awq,
    awq_gemv,
    gptq,
    int8_channel,
    mlx,
    modelopt_int4,
    pack_quantized,
    quark,
    read_awq,
    read_awq_gemv,
    read_gptq,
    read_ints,
    read_mlx,
    read_modelopt_int4,
    read_quark,
    read_unrounded_int4,
    unrounded_int4,
)
from support.packing_libraries import (
    bnb4,
    bnb8,
    read_bnb4,
    read_bnb8,
    read_torchao_fp8,
    read_torchao_int4,
    read_torchao_int8,
    torchao_fp8,
    torchao_int4,
    torchao_int8,
)

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint32: "U32",
}


def pack(weight: Tensor, how: str) -> Parts:
    """A matrix [out, in] as `how` stores it; groups are halved until they divide the input features."""
    return FORMATS[how][0](weight.float())


def takes(how: str, shape: tuple[int, int]) -> bool:
    """Whether a matrix of this shape can be stored so."""
    least = 32 if how.startswith(("mx", "gptq3")) else 16 if how.startswith(("nvfp4_mlx", "awq_gemv")) else 8
    return shape[1] % least == 0


def hint_of(how: str) -> dict[str, Any]:
    """What a quantisation config must say of a matrix that `pack` made: what its tensors leave open."""
    if how.startswith("unrounded"):
        return {
            "weights": {"num_bits": 8, "type": "float"} if "fp8" in how else {"num_bits": 4, "type": "int"}
        }
    if how.startswith("quark"):
        signed = how == "quark_int4"
        return {"dtype": "int4" if signed else "uint4", "pack_method": "order" if signed else "reorder"}
    if not how.startswith("gptq"):
        return {}
    return {"checkpoint_format": "gptq_v2" if how == "gptq_v2" else "gptq"}


def unpacked(how: str, parts: Parts, shape: tuple[int, ...]) -> Tensor:
    """What the parts mean, float32 [out, in]."""
    values = FORMATS[how][1](parts, *shape)
    return torch.from_numpy(np.ascontiguousarray(values.astype(np.float32)))


def header(parts: Parts) -> dict[str, Part]:
    """What a safetensors header says of these tensors."""
    return {name: Part(DTYPE_NAMES[part.dtype], tuple(part.shape)) for name, part in parts.items()}


MX_NAMES = {
    "mxfp4_compressed": ("weight_packed", "weight_scale", 4),
    "mxfp4_modelopt": ("weight", "weight_scale", 4),
    "mxfp4_blocks": ("blocks", "scales", 4),
    "mxfp4_mlx": ("weight", "scales", 4),
    "mxfp8_compressed": ("weight", "weight_scale", 8),
    "mxfp8_mlx": ("weight", "scales", 8),
}


FORMATS: dict[str, tuple[Callable[..., Parts], Callable[..., np.ndarray]]] = {
    "fp8_block": (fp8_block, read_fp8),
    "fp8_channel": (fp8_channel, read_fp8),
    "fp8_e5m2": (fp8_e5m2, read_fp8),
    "fp8_tensor": (fp8_tensor, read_fp8),
    "fp8_static": (static, read_fp8),
    "nvfp4_modelopt": (partial(nvfp4, "weight", "weight_scale_2"), read_nvfp4),
    "nvfp4_compressed": (partial(nvfp4, "weight_packed", "weight_global_scale"), read_nvfp4),
    "int4_g32": (partial(pack_quantized, 4, 32), read_ints),
    "int4_g64": (partial(pack_quantized, 4, 64), read_ints),
    "int4_g128": (partial(pack_quantized, 4, 128), read_ints),
    "int4_asym": (partial(pack_quantized, 4, 32, asymmetric=True), read_ints),
    "int4_actorder": (partial(pack_quantized, 4, 32, shuffled=True), read_ints),
    "int8_channel": (int8_channel, read_ints),
    "int8_pack": (partial(pack_quantized, 8, 128), read_ints),
    "awq": (awq, read_awq),
    "gptq_v1": (partial(gptq, 1), partial(read_gptq, 1)),
    "gptq_v2": (partial(gptq, 0), partial(read_gptq, 0)),
    "gptq_actorder": (partial(gptq, 1, shuffled=True), partial(read_gptq, 1)),
    "mlx4": (partial(mlx, 4), read_mlx),
    "mlx8": (partial(mlx, 8), read_mlx),
    "gptq3": (partial(gptq, 1, bits=3), partial(read_gptq, 1, bits=3)),
    **{how: (partial(mx, *names), partial(read_mx, *names)) for how, names in MX_NAMES.items()},
    "mxfp4_deepseek": (mxfp4_deepseek, read_mxfp4_deepseek),
    "fp8_powers": (partial(fp8_powers, dtype=torch.float8_e8m0fnu), read_fp8_powers),
    "fp8_bytes": (partial(fp8_powers, dtype=torch.uint8), read_fp8_powers),
    "nvfp4_mlx": (nvfp4_mlx, read_nvfp4_mlx),
    "nf4": (partial(bnb4, "nf4"), partial(read_bnb4, "nf4")),
    "nf4_nested": (partial(bnb4, "nf4", nested=True), partial(read_bnb4, "nf4")),
    "fp4": (partial(bnb4, "fp4"), partial(read_bnb4, "fp4")),
    "bnb8": (bnb8, read_bnb8),
    "awq_gemv": (awq_gemv, read_awq_gemv),
    "quark_int4": (partial(quark, True), partial(read_quark, True)),
    "quark_uint4": (partial(quark, False), partial(read_quark, False)),
    "modelopt_int4": (modelopt_int4, read_modelopt_int4),
    "modelopt_int4_smooth": (partial(modelopt_int4, smooth=True), read_modelopt_int4),
    "torchao_int8": (torchao_int8, read_torchao_int8),
    "torchao_int4": (torchao_int4, read_torchao_int4),
    "torchao_fp8": (torchao_fp8, read_torchao_fp8),
    "unrounded_int4": (unrounded_int4, read_unrounded_int4),
    "unrounded_fp8": (unrounded_fp8, read_unrounded_fp8),
}
