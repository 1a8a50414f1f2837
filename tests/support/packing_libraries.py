"""Matrices packed as bitsandbytes and torchao store them, and back."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.packing_bits import Parts, fields_of, fitting_group, floats, spread, step
from support.packing_floats import fp8_channel, read_fp8
from support.packing_ints import pack_quantized

TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * code / 12 for sign in (1, -1) for code in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}
STATE = "weight.quant_state.bitsandbytes__"


def bnb4(kind: str, weight: Tensor, nested: bool = False) -> Parts:
    """Blocks of 64 codes, which run on from row to row; `nested` packs their largest magnitudes."""
    flat = weight.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % 64)).view(-1, 64)
    absmax = blocks.abs().amax(1).clamp(min=1e-6)
    table = torch.tensor(TABLES[kind])
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1).view(-1)[: flat.numel()]
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "shape": list(weight.shape)}
    parts = {"weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
    if nested:
        offset = float(absmax.mean())
        state |= {"nested_blocksize": 256, "nested_offset": offset}
        outer = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        parts["weight.nested_absmax"] = outer.abs().amax(1).clamp(min=1e-6)
        parts["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
        wanted = (outer / parts["weight.nested_absmax"][:, None]).reshape(-1, 1)[: len(absmax)]
        parts["weight.absmax"] = (wanted - parts["weight.nested_quant_map"]).abs().argmin(1).to(torch.uint8)
    else:
        parts["weight.absmax"] = absmax
    return parts | {STATE + kind: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def read_bnb4(kind: str, parts: Parts, rows: int, columns: int) -> np.ndarray:
    absmax = parts["weight.absmax"].numpy()
    if "weight.nested_absmax" in parts:
        offset = np.float32(json.loads(bytes(parts[STATE + kind].tolist()))["nested_offset"])
        outer = np.repeat(parts["weight.nested_absmax"].numpy(), 256)[: len(absmax)]
        absmax = parts["weight.nested_quant_map"].numpy()[absmax] * outer + offset
    codes = parts["weight"].numpy().reshape(-1)
    table = parts["weight.quant_map"].numpy()
    values = table[np.stack([codes >> 4, codes & 15], -1).reshape(-1)]
    return (values * np.repeat(absmax, 64)[: rows * columns]).reshape(rows, columns)


def bnb8(weight: Tensor) -> Parts:
    largest = weight.abs().amax(1).clamp(min=1e-6)
    codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def read_bnb8(parts: Parts, rows: int, columns: int) -> np.ndarray:  # noqa: ARG001 - like the others
    scales = parts["SCB"].numpy() * np.float32(1 / 127)
    return parts["weight"].numpy().astype(np.float32) * scales[:, None]


def torchao_int8(weight: Tensor) -> Parts:
    parts = pack_quantized(8, 32, weight)
    codes = fields_of(parts["weight_packed"], 8, weight.shape[1]) - 128
    return {
        "_weight_qdata": torch.from_numpy(codes).to(torch.int8),
        "_weight_scale": parts["weight_scale"],
        "_weight_zero_point": torch.zeros(parts["weight_scale"].shape, dtype=torch.int8),
    }


def read_torchao_int8(parts: Parts, rows: int, columns: int) -> np.ndarray:
    scale, zero = floats(parts["_weight_scale"]), parts["_weight_zero_point"].numpy()
    block = (1, columns // scale.shape[1])
    codes = parts["_weight_qdata"].numpy() - spread(zero, rows, columns, block)
    return codes.astype(np.float32) * spread(scale, rows, columns, block)


def torchao_int4(weight: Tensor) -> Parts:
    columns = weight.shape[1]
    blocks = weight.unflatten(1, (-1, fitting_group(columns, 32)))
    low = blocks.amin(2)
    scale = step(blocks.amax(2) - low, 15, torch.bfloat16)
    codes = ((blocks - low[..., None]) / scale.float()[..., None]).round().clamp(0, 15).flatten(
        1
    ).int() - 8 & 15
    zero = (low + 8 * scale.float()).bfloat16()
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return {
        "_weight_qdata": packed,
        "_weight_scale": scale.t().contiguous(),
        "_weight_zero_point": zero.t().contiguous(),
    }


def read_torchao_int4(parts: Parts, rows: int, columns: int) -> np.ndarray:
    packed = parts["_weight_qdata"].numpy().astype(np.int64)
    fields = np.stack([packed & 15, packed >> 4], -1).reshape(rows, columns)
    scale, zero = (floats(parts[name]).T for name in ("_weight_scale", "_weight_zero_point"))
    block = (1, columns // scale.shape[1])
    codes = np.where(fields > 7, fields - 16, fields).astype(np.float32)
    return codes * spread(scale, rows, columns, block) + spread(zero, rows, columns, block)


def torchao_fp8(weight: Tensor) -> Parts:
    parts = fp8_channel(weight)
    return {"_weight_qdata": parts["weight"], "_weight_scale": parts["weight_scale"]}


def read_torchao_fp8(parts: Parts, rows: int, columns: int) -> np.ndarray:
    named = {"weight": parts["_weight_qdata"], "weight_scale": parts["_weight_scale"]}
    return read_fp8(named, rows, columns)
