"""Matrices packed into small floats (FP8, NVFP4, MXFP4, MXFP8), and back."""

import numpy as np
import torch
from torch import Tensor

from support.packing_bits import Parts, e4m3, fitting_group, floats, minifloat, spread, step


def fp8_block(weight: Tensor, side: int = 128) -> Parts:
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // side), -(-columns // side))
    for down in range(scale.shape[0]):
        for across in range(scale.shape[1]):
            tile = weight[down * side : (down + 1) * side, across * side : (across + 1) * side]
            scale[down, across] = tile.abs().max() / 448
    scale = scale.clamp(min=1e-6).bfloat16()
    each = torch.from_numpy(spread(scale.float().numpy(), rows, columns, (side, side)))
    return {"weight": e4m3(weight / each), "weight_scale_inv": scale}


def fp8_channel(weight: Tensor) -> Parts:
    scale = step(weight.abs().amax(1, keepdim=True), 448, torch.float32)
    return {"weight": e4m3(weight / scale), "weight_scale": scale}


def fp8_e5m2(weight: Tensor) -> Parts:
    scale = step(weight.abs().amax(1, keepdim=True), 57344, torch.float32)
    return {"weight": (weight / scale).clamp(-57344, 57344).to(torch.float8_e5m2), "weight_scale": scale}


def fp8_tensor(weight: Tensor) -> Parts:
    scale = step(weight.abs().max(), 448, torch.float32)
    return {"weight": e4m3(weight / scale), "weight_scale": scale}


def static(weight: Tensor) -> Parts:
    return fp8_tensor(weight) | {"input_scale": torch.tensor(0.02)}


def read_fp8(parts: Parts, rows: int, columns: int) -> np.ndarray:
    if "weight_scale_inv" in parts:
        block, scale = (128, 128), parts["weight_scale_inv"]
    else:
        scale = parts["weight_scale"]
        block = (1 if scale.numel() == rows else rows, columns)
        scale = scale.reshape(-1, 1)
    return floats(parts["weight"]) * spread(floats(scale), rows, columns, block)


def nvfp4(codes_name: str, global_name: str, weight: Tensor) -> Parts:
    group = fitting_group(weight.shape[1], 16)
    overall = (weight.abs().max() / (6 * 448)).clamp(min=1e-9)
    blocks = weight.unflatten(1, (-1, group))
    scale = (blocks.abs().amax(2) / 6 / overall).clamp(0.02, 448).to(torch.float8_e4m3fn)
    grid = torch.tensor([minifloat(code, 2, 1) for code in range(16)])
    wanted = (blocks / (scale.float() * overall)[..., None]).flatten(1)
    codes = (wanted[..., None] - grid).abs().argmin(-1)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    stored = overall if global_name == "weight_scale_2" else (1 / overall).view(1)
    return {codes_name: packed, "weight_scale": scale, global_name: stored}


def read_nvfp4(parts: Parts, rows: int, columns: int) -> np.ndarray:
    codes = parts["weight_packed" if "weight_packed" in parts else "weight"].numpy()
    halves = np.stack([codes & 15, codes >> 4], -1).reshape(rows, columns)
    values = np.array([[minifloat(int(code), 2, 1) for code in row] for row in halves], np.float32)
    scale = floats(parts["weight_scale"])
    if "weight_scale_2" in parts:
        scale = scale * np.float32(parts["weight_scale_2"].item())
    else:
        scale = scale / np.float32(parts["weight_global_scale"].item())
    return values * spread(scale, rows, columns, (1, columns // scale.shape[1]))


def mx(codes_name: str, scales_name: str, bits: int, weight: Tensor) -> Parts:
    """Floats of 4 (e2m1) or 8 (e4m3) bits times powers of two by 32 columns; MLX's are words."""
    blocks = weight.unflatten(1, (-1, 32))
    powers = torch.floor(torch.log2(blocks.abs().amax(2).clamp(min=1e-20))) - (2 if bits == 4 else 8)
    wanted = (blocks / 2.0 ** powers[..., None]).flatten(1)
    scales = (powers + 127).to(torch.uint8)
    if bits == 8:
        stored = e4m3(wanted)
        return {
            codes_name: stored.view(torch.uint32) if scales_name == "scales" else stored,
            scales_name: scales,
        }
    packed = _e2m1_bytes(wanted)
    if codes_name == "blocks":
        packed = packed.view(len(weight), -1, 16)
    elif scales_name == "scales":
        packed = packed.view(torch.uint32)
    return {codes_name: packed, scales_name: scales}


def _e2m1_bytes(wanted: Tensor) -> Tensor:
    grid = torch.tensor([minifloat(code, 2, 1) for code in range(16)])
    codes = (wanted[..., None] - grid).abs().argmin(-1)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def _e2m1_values(packed: Tensor, rows: int, columns: int) -> np.ndarray:
    codes = packed.view(torch.uint8).reshape(rows, -1).numpy()
    halves = np.stack([codes & 15, codes >> 4], -1).reshape(rows, columns)
    return np.array([[minifloat(int(code), 2, 1) for code in row] for row in halves], np.float32)


def read_mx(
    codes_name: str, scales_name: str, bits: int, parts: Parts, rows: int, columns: int
) -> np.ndarray:
    if bits == 4:
        values = _e2m1_values(parts[codes_name], rows, columns)
    else:
        values = floats(parts[codes_name].view(torch.float8_e4m3fn))
    scales = np.array([[2.0 ** (int(power) - 127) for power in row] for row in parts[scales_name].numpy()])
    return values * spread(scales, rows, columns, (1, 32))


def nvfp4_mlx(weight: Tensor) -> Parts:
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6).clamp(0.02, 448).to(torch.float8_e4m3fn)
    wanted = (weight.unflatten(1, (-1, 16)) / scales.float()[..., None]).flatten(1)
    return {"weight": _e2m1_bytes(wanted).view(torch.uint32), "scales": scales.view(torch.uint8)}


def read_nvfp4_mlx(parts: Parts, rows: int, columns: int) -> np.ndarray:
    scales = floats(parts["scales"].view(torch.float8_e4m3fn))
    return _e2m1_values(parts["weight"], rows, columns) * spread(scales, rows, columns, (1, 16))


def unrounded_fp8(weight: Tensor) -> Parts:
    return {"weight": weight, "weight_scale": fp8_channel(weight)["weight_scale"]}


def read_unrounded_fp8(parts: Parts, rows: int, columns: int) -> np.ndarray:
    scaled = parts["weight"] / parts["weight_scale"]
    return read_fp8({"weight": e4m3(scaled), "weight_scale": parts["weight_scale"]}, rows, columns)


def fp8_powers(weight: Tensor, dtype: torch.dtype) -> Parts:
    """As DeepSeek-V4 stores it: scales of blocks are powers of two, a byte each."""
    scale = fp8_block(weight)["weight_scale_inv"].float()
    exponents = torch.ceil(torch.log2(scale)).clamp(-127, 127)
    rows, columns = weight.shape
    each = torch.from_numpy(spread(2.0 ** exponents.numpy(), rows, columns, (128, 128)))
    stored = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": stored, "scale": (exponents + 127).to(torch.uint8).view(dtype)}


def read_fp8_powers(parts: Parts, rows: int, columns: int) -> np.ndarray:
    scale = floats(parts["scale"].view(torch.float8_e8m0fnu))
    return floats(parts["weight"]) * spread(scale, rows, columns, (128, 128))


def with_float_scales(parts: Parts) -> Parts:
    """What DeepSeek-V4 stores, with the same scales in float32."""
    powers = floats(parts["scale"].view(torch.float8_e8m0fnu))
    return {"weight": parts["weight"], "weight_scale_inv": torch.from_numpy(powers)}


def mxfp4_deepseek(weight: Tensor) -> Parts:
    parts = mx("weight", "scale", 4, weight)
    return {"weight": parts["weight"].view(torch.int8), "scale": parts["scale"].view(torch.float8_e8m0fnu)}


def read_mxfp4_deepseek(parts: Parts, rows: int, columns: int) -> np.ndarray:
    bytes_of = {name: part.view(torch.uint8) for name, part in parts.items()}
    return read_mx("weight", "scale", 4, bytes_of, rows, columns)
