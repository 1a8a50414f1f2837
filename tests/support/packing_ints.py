"""Matrices packed into whole numbers by group (compressed-tensors, GPTQ, AWQ, MLX, modelopt), and back."""

import numpy as np
import torch
from torch import Tensor

from support.packing_bits import (
    Parts,
    affine,
    column_order,
    fields_of,
    fitting_group,
    floats,
    rounded_ints,
    spread,
    step,
    words_of,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_quantized(
    bits: int, wanted_group: int, weight: Tensor, asymmetric: bool = False, shuffled: bool = False
) -> Parts:
    rows, columns = weight.shape
    g_idx = column_order(columns, fitting_group(columns, wanted_group), shuffled)
    codes, scale, zero = rounded_ints(weight, bits, g_idx, asymmetric, torch.bfloat16)
    parts = {
        "weight_packed": words_of(codes.numpy(), bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if asymmetric:
        parts["weight_zero_point"] = words_of(zero.t().numpy(), bits).t().contiguous()
    if shuffled:
        parts["weight_g_idx"] = g_idx
    return parts


def int8_channel(weight: Tensor) -> Parts:
    runs = column_order(weight.shape[1], weight.shape[1], shuffled=False)
    codes, scale, _ = rounded_ints(weight, 8, runs, False, torch.bfloat16)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}


def read_ints(parts: Parts, rows: int, columns: int) -> np.ndarray:
    """compressed-tensors, both kinds."""
    scale = floats(parts["weight_scale"]).reshape(rows, -1)
    if "weight" in parts:
        codes, bits = parts["weight"].numpy().astype(np.int64) + 128, 8
    else:
        bits = 8 if parts["weight_packed"].shape[1] == -(-columns // 4) else 4
        codes = fields_of(parts["weight_packed"], bits, columns)
    zero = np.full(scale.shape, 1 << (bits - 1))
    if "weight_zero_point" in parts:
        zero = fields_of(parts["weight_zero_point"].t(), bits, rows).T
    return affine(codes, zero, scale, parts.get("weight_g_idx"))


def gptq(stored_less: int, weight: Tensor, shuffled: bool = False, bits: int = 4) -> Parts:
    """`stored_less` is what a zero point is stored less than it is: 1 in the first version."""
    columns = weight.shape[1]
    g_idx = column_order(columns, fitting_group(columns, 128), shuffled)
    codes, scale, zero = rounded_ints(weight, bits, g_idx, True, torch.float16, first_zero=1)
    return {
        "qweight": words_of(codes.numpy(), bits).t().contiguous(),
        "qzeros": words_of((zero - stored_less).t().numpy(), bits),
        "scales": scale.t().contiguous(),
        "g_idx": g_idx,
    }


def read_gptq(stored_less: int, parts: Parts, rows: int, columns: int, bits: int = 4) -> np.ndarray:
    codes = fields_of(parts["qweight"].t(), bits, columns)
    zero = fields_of(parts["qzeros"], bits, rows).T + stored_less
    return affine(codes, zero, floats(parts["scales"]).T, parts.get("g_idx"))


def awq(weight: Tensor) -> Parts:
    columns = weight.shape[1]
    runs = column_order(columns, fitting_group(columns, 128), shuffled=False)
    codes, scale, zero = rounded_ints(weight, 4, runs, True, torch.float16)
    return {
        "qweight": words_of(_awq_places(codes.t()), 4),
        "qzeros": words_of(_awq_places(zero.t()), 4),
        "scales": scale.t().contiguous(),
    }


def _awq_places(values: Tensor) -> np.ndarray:
    return values.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1).numpy()


def read_awq(parts: Parts, rows: int, columns: int) -> np.ndarray:
    places = [8 * (row // 8) + AWQ_ORDER.index(row % 8) for row in range(rows)]
    codes = fields_of(parts["qweight"], 4, rows)[:, places].T
    zero = fields_of(parts["qzeros"], 4, rows)[:, places].T
    return affine(codes, zero, floats(parts["scales"]).T, None).reshape(rows, columns)


def awq_gemv(weight: Tensor) -> Parts:
    """Eight columns to a word; groups of 32 or 16 have room for a multiple of 32 or 64 groups."""
    columns = weight.shape[1]
    group = fitting_group(columns, 32)
    codes, scale, zero = rounded_ints(weight, 4, torch.arange(columns) // group, True, torch.float16)
    room = -(-(columns // group) // (8 * 128 // group)) * (8 * 128 // group)
    missing = (0, room - columns // group)
    return {
        "qweight": words_of(codes.numpy(), 4),
        "qzeros": words_of(torch.nn.functional.pad(zero, missing).numpy(), 4),
        "scales": torch.nn.functional.pad(scale, missing),
    }


def read_awq_gemv(parts: Parts, rows: int, columns: int) -> np.ndarray:  # noqa: ARG001 - like the others
    groups = columns // fitting_group(columns, 32)
    zero = fields_of(parts["qzeros"], 4, groups)
    return affine(fields_of(parts["qweight"], 4, columns), zero, floats(parts["scales"])[:, :groups], None)


def mlx(bits: int, weight: Tensor, wanted_group: int = 64) -> Parts:
    group = fitting_group(weight.shape[1], wanted_group)
    blocks = weight.unflatten(1, (-1, group))
    biases = blocks.amin(2).bfloat16()
    scales = step(blocks.amax(2) - biases.float(), (1 << bits) - 1, torch.bfloat16)
    codes = (
        ((blocks - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, (1 << bits) - 1)
    )
    words = words_of(codes.flatten(1).long().numpy(), bits)
    return {"weight": words.view(torch.uint32), "scales": scales, "biases": biases}


def read_mlx(parts: Parts, rows: int, columns: int) -> np.ndarray:
    bits = parts["weight"].shape[1] * 32 // columns
    codes = fields_of(parts["weight"], bits, columns).astype(np.float32)
    block = (1, columns // parts["scales"].shape[1])
    scales, biases = (spread(floats(parts[name]), rows, columns, block) for name in ("scales", "biases"))
    return codes * scales + biases


def modelopt_int4(weight: Tensor, smooth: bool = False) -> Parts:
    columns = weight.shape[1]
    factors = torch.linspace(0.5, 2.0, columns).half() if smooth else None
    weight = weight if factors is None else weight / factors.float()
    runs = torch.arange(columns) // fitting_group(columns, 128)
    codes, scale, _ = rounded_ints(weight, 4, runs, False, torch.float16)
    fields = codes - 8 & 15
    parts = {"weight": (fields[0::2] | fields[1::2] << 4).to(torch.uint8), "weight_scale": scale}
    return parts if factors is None else parts | {"pre_quant_scale": factors}


def read_modelopt_int4(parts: Parts, rows: int, columns: int) -> np.ndarray:
    packed = parts["weight"].numpy().astype(np.int64)
    fields = np.stack([packed & 15, packed >> 4], 1).reshape(rows, columns)
    scale = floats(parts["weight_scale"])
    values = np.where(fields > 7, fields - 16, fields).astype(np.float32)
    values = values * spread(scale, rows, columns, (1, columns // scale.shape[1]))
    return values * (floats(parts["pre_quant_scale"]) if "pre_quant_scale" in parts else 1)


def unrounded_int4(weight: Tensor) -> Parts:
    runs = torch.arange(weight.shape[1]) // fitting_group(weight.shape[1], 32)
    _, scale, _ = rounded_ints(weight, 4, runs, False, torch.float32)
    return {"weight": weight, "weight_scale": scale}


def read_unrounded_int4(parts: Parts, rows: int, columns: int) -> np.ndarray:
    scale = parts["weight_scale"].numpy()
    each = spread(scale, rows, columns, (1, columns // scale.shape[1]))
    return np.clip(np.round(parts["weight"].numpy() / each), -8, 7) * each


def quark(signed: bool, weight: Tensor) -> Parts:
    """Below zero and in order without zero points, or above it in AWQ's order with them."""
    runs = column_order(weight.shape[1], fitting_group(weight.shape[1], 32), shuffled=False)
    codes, scale, zero = rounded_ints(weight, 4, runs, not signed, torch.bfloat16)
    if signed:
        fields = ((codes - 8) & 15).t().numpy()
        return {"weight": words_of(fields, 4), "weight_scale": scale.t().contiguous()}
    return {
        "weight": words_of(_awq_places(codes.t()), 4),
        "weight_scale": scale.t().contiguous(),
        "weight_zero_point": words_of(_awq_places(zero.t()), 4),
    }


def read_quark(signed: bool, parts: Parts, rows: int, columns: int) -> np.ndarray:
    places = range(rows) if signed else [8 * (row // 8) + AWQ_ORDER.index(row % 8) for row in range(rows)]
    codes = fields_of(parts["weight"], 4, rows)[:, list(places)].T
    scale = floats(parts["weight_scale"]).T
    if signed:
        codes, zero = np.where(codes > 7, codes - 16, codes), np.zeros(scale.shape)
    else:
        zero = fields_of(parts["weight_zero_point"], 4, rows)[:, list(places)].T
    return affine(codes, zero, scale, None).reshape(rows, columns)
