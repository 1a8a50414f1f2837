"""Float matrices packed into every on-disk format, and the slow way back, both from the formats' definitions.

`pack` gives the tensors of one module by their suffixes; `unpacked` what they mean, with codes read one by one and
only the last formula in float32 arrays. Knows of Headlong only how a header describes a tensor.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headlong.quant.format import Part

Parts = dict[str, Tensor]

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
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


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


def fitting_group(columns: int, wanted: int) -> int:
    while columns % wanted:
        wanted //= 2
    return wanted


def words_of(codes: np.ndarray, bits: int) -> Tensor:
    """Each row as one little-endian stream of bits, cut into int32 words."""
    stream = (codes[:, :, None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view("<i4").copy())


def fields_of(words: Tensor, bits: int, count: int) -> np.ndarray:
    """The other way: unsigned fields [rows, count]."""
    rows = []
    for row in words.contiguous().view(torch.int32).numpy().astype("<i4"):
        stream = int.from_bytes(row.tobytes(), "little")
        rows.append([stream >> (at * bits) & ((1 << bits) - 1) for at in range(count)])
    return np.array(rows, dtype=np.int64).reshape(len(rows), count)


def floats(tensor: Tensor) -> np.ndarray:
    """Any float tensor as float32, the eight-bit ones by their definition."""
    if tensor.element_size() > 1:
        return tensor.float().numpy()
    kind = {torch.float8_e4m3fn: (4, 3), torch.float8_e5m2: (5, 2), torch.float8_e8m0fnu: (8, 0)}[
        tensor.dtype
    ]
    table = [minifloat(code, *kind) for code in range(256)]
    codes = tensor.contiguous().view(torch.uint8).numpy()
    return np.array([table[code] for code in codes.reshape(-1)], np.float32).reshape(codes.shape)


def minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """A small float without infinities but for e5m2; e8m0 has neither sign nor mantissa, only powers of two."""
    if mantissa_bits == 0:
        return float("nan") if code == 255 else 2.0 ** (code - 127)
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if (exponent_bits, exponent) == (5, 31):
        return float("nan") if mantissa else sign * float("inf")
    if (exponent_bits, code & 127) == (4, 127):
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def spread(factors: np.ndarray, rows: int, columns: int, block: tuple[int, int]) -> np.ndarray:
    """Each element's own factor, where blocks of rows and columns share one."""
    return np.array([[factors[r // block[0], c // block[1]] for c in range(columns)] for r in range(rows)])


def _step(largest: Tensor, steps: float, dtype: torch.dtype) -> Tensor:
    return (largest / steps).clamp(min=1e-6).to(dtype)


def _fp8_block(weight: Tensor, side: int = 128) -> Parts:
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // side), -(-columns // side))
    for down in range(scale.shape[0]):
        for across in range(scale.shape[1]):
            tile = weight[down * side : (down + 1) * side, across * side : (across + 1) * side]
            scale[down, across] = tile.abs().max() / 448
    scale = scale.clamp(min=1e-6).bfloat16()
    each = torch.from_numpy(spread(scale.float().numpy(), rows, columns, (side, side)))
    return {"weight": _e4m3(weight / each), "weight_scale_inv": scale}


def _e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)


def _fp8_channel(weight: Tensor) -> Parts:
    scale = _step(weight.abs().amax(1, keepdim=True), 448, torch.float32)
    return {"weight": _e4m3(weight / scale), "weight_scale": scale}


def _fp8_e5m2(weight: Tensor) -> Parts:
    scale = _step(weight.abs().amax(1, keepdim=True), 57344, torch.float32)
    return {"weight": (weight / scale).clamp(-57344, 57344).to(torch.float8_e5m2), "weight_scale": scale}


def _fp8_tensor(weight: Tensor) -> Parts:
    scale = _step(weight.abs().max(), 448, torch.float32)
    return {"weight": _e4m3(weight / scale), "weight_scale": scale}


def _nvfp4(codes_name: str, global_name: str, weight: Tensor) -> Parts:
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


def column_order(columns: int, group: int, shuffled: bool) -> Tensor:
    """Each column's group: runs of columns, or, as act-order leaves them, any columns."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if shuffled else None
    runs = torch.arange(columns) // group
    return (runs if order is None else torch.empty_like(runs).index_copy_(0, order, runs)).int()


def rounded_ints(
    weight: Tensor, bits: int, groups: Tensor, asymmetric: bool, dtype: torch.dtype, first_zero: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes [out, in], scales and unsigned zeros [out, groups]."""
    top, num_groups = (1 << bits) - 1, int(groups.max()) + 1
    members = [weight[:, groups == group] for group in range(num_groups)]
    low = torch.stack([columns.amin(1) for columns in members], 1).clamp(max=0)
    high = torch.stack([columns.amax(1) for columns in members], 1).clamp(min=0)
    half = torch.full_like(low, 1 << (bits - 1))
    if asymmetric:
        scale = _step(high - low, top, dtype)
        zero = (-low / scale.float()).round().clamp(first_zero, top)
    else:
        scale, zero = _step(torch.maximum(-low, high), top / 2, dtype), half
    index = groups.long()
    codes = (weight / scale.float()[:, index]).round() + zero[:, index]
    return codes.clamp(0, top).long(), scale, zero.long()


def _pack_quantized(
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


def _int8_channel(weight: Tensor) -> Parts:
    runs = column_order(weight.shape[1], weight.shape[1], shuffled=False)
    codes, scale, _ = rounded_ints(weight, 8, runs, False, torch.bfloat16)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}


def _gptq(stored_less: int, weight: Tensor, shuffled: bool = False, bits: int = 4) -> Parts:
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


def _awq(weight: Tensor) -> Parts:
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


def _mlx(bits: int, weight: Tensor, wanted_group: int = 64) -> Parts:
    group = fitting_group(weight.shape[1], wanted_group)
    blocks = weight.unflatten(1, (-1, group))
    biases = blocks.amin(2).bfloat16()
    scales = _step(blocks.amax(2) - biases.float(), (1 << bits) - 1, torch.bfloat16)
    codes = (
        ((blocks - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, (1 << bits) - 1)
    )
    words = words_of(codes.flatten(1).long().numpy(), bits)
    return {"weight": words.view(torch.uint32), "scales": scales, "biases": biases}


def _read_fp8(parts: Parts, rows: int, columns: int) -> np.ndarray:
    if "weight_scale_inv" in parts:
        block, scale = (128, 128), parts["weight_scale_inv"]
    else:
        scale = parts["weight_scale"]
        block = (1 if scale.numel() == rows else rows, columns)
        scale = scale.reshape(-1, 1)
    return floats(parts["weight"]) * spread(floats(scale), rows, columns, block)


def _read_nvfp4(parts: Parts, rows: int, columns: int) -> np.ndarray:
    codes = parts["weight_packed" if "weight_packed" in parts else "weight"].numpy()
    halves = np.stack([codes & 15, codes >> 4], -1).reshape(rows, columns)
    values = np.array([[minifloat(int(code), 2, 1) for code in row] for row in halves], np.float32)
    scale = floats(parts["weight_scale"])
    if "weight_scale_2" in parts:
        scale = scale * np.float32(parts["weight_scale_2"].item())
    else:
        scale = scale / np.float32(parts["weight_global_scale"].item())
    return values * spread(scale, rows, columns, (1, columns // scale.shape[1]))


def _read_ints(parts: Parts, rows: int, columns: int) -> np.ndarray:
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
    return _affine(codes, zero, scale, parts.get("weight_g_idx"))


def _affine(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray, g_idx: Tensor | None) -> np.ndarray:
    columns = codes.shape[1]
    group = columns // scale.shape[1]
    of_column = [c // group for c in range(columns)] if g_idx is None else g_idx.tolist()
    return (codes - zero[:, of_column]).astype(np.float32) * scale[:, of_column]


def _read_gptq(stored_less: int, parts: Parts, rows: int, columns: int, bits: int = 4) -> np.ndarray:
    codes = fields_of(parts["qweight"].t(), bits, columns)
    zero = fields_of(parts["qzeros"], bits, rows).T + stored_less
    return _affine(codes, zero, floats(parts["scales"]).T, parts.get("g_idx"))


def _read_awq(parts: Parts, rows: int, columns: int) -> np.ndarray:
    places = [8 * (row // 8) + AWQ_ORDER.index(row % 8) for row in range(rows)]
    codes = fields_of(parts["qweight"], 4, rows)[:, places].T
    zero = fields_of(parts["qzeros"], 4, rows)[:, places].T
    return _affine(codes, zero, floats(parts["scales"]).T, None).reshape(rows, columns)


def _read_mlx(parts: Parts, rows: int, columns: int) -> np.ndarray:
    bits = parts["weight"].shape[1] * 32 // columns
    codes = fields_of(parts["weight"], bits, columns).astype(np.float32)
    block = (1, columns // parts["scales"].shape[1])
    scales, biases = (spread(floats(parts[name]), rows, columns, block) for name in ("scales", "biases"))
    return codes * scales + biases


def _static(weight: Tensor) -> Parts:
    return _fp8_tensor(weight) | {"input_scale": torch.tensor(0.02)}


def _mx(codes_name: str, scales_name: str, bits: int, weight: Tensor) -> Parts:
    """Floats of 4 (e2m1) or 8 (e4m3) bits times powers of two by 32 columns; MLX's are words."""
    blocks = weight.unflatten(1, (-1, 32))
    powers = torch.floor(torch.log2(blocks.abs().amax(2).clamp(min=1e-20))) - (2 if bits == 4 else 8)
    wanted = (blocks / 2.0 ** powers[..., None]).flatten(1)
    scales = (powers + 127).to(torch.uint8)
    if bits == 8:
        stored = _e4m3(wanted)
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


def _read_mx(
    codes_name: str, scales_name: str, bits: int, parts: Parts, rows: int, columns: int
) -> np.ndarray:
    if bits == 4:
        values = _e2m1_values(parts[codes_name], rows, columns)
    else:
        values = floats(parts[codes_name].view(torch.float8_e4m3fn))
    scales = np.array([[2.0 ** (int(power) - 127) for power in row] for row in parts[scales_name].numpy()])
    return values * spread(scales, rows, columns, (1, 32))


def _nvfp4_mlx(weight: Tensor) -> Parts:
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6).clamp(0.02, 448).to(torch.float8_e4m3fn)
    wanted = (weight.unflatten(1, (-1, 16)) / scales.float()[..., None]).flatten(1)
    return {"weight": _e2m1_bytes(wanted).view(torch.uint32), "scales": scales.view(torch.uint8)}


def _read_nvfp4_mlx(parts: Parts, rows: int, columns: int) -> np.ndarray:
    scales = floats(parts["scales"].view(torch.float8_e4m3fn))
    return _e2m1_values(parts["weight"], rows, columns) * spread(scales, rows, columns, (1, 16))


NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0)
NF4 += (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)
STATE = "weight.quant_state.bitsandbytes__nf4"


def _nf4(weight: Tensor, nested: bool = False) -> Parts:
    """Blocks of 64 codes, which run on from row to row; `nested` packs their largest magnitudes."""
    flat = weight.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % 64)).view(-1, 64)
    absmax = blocks.abs().amax(1).clamp(min=1e-6)
    table = torch.tensor(NF4)
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1).view(-1)[: flat.numel()]
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
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
    return parts | {STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def _read_nf4(parts: Parts, rows: int, columns: int) -> np.ndarray:
    absmax = parts["weight.absmax"].numpy()
    if "weight.nested_absmax" in parts:
        offset = np.float32(json.loads(bytes(parts[STATE].tolist()))["nested_offset"])
        outer = np.repeat(parts["weight.nested_absmax"].numpy(), 256)[: len(absmax)]
        absmax = parts["weight.nested_quant_map"].numpy()[absmax] * outer + offset
    codes = parts["weight"].numpy().reshape(-1)
    table = parts["weight.quant_map"].numpy()
    values = table[np.stack([codes >> 4, codes & 15], -1).reshape(-1)]
    return (values * np.repeat(absmax, 64)[: rows * columns]).reshape(rows, columns)


def _bnb8(weight: Tensor) -> Parts:
    largest = weight.abs().amax(1).clamp(min=1e-6)
    codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def _read_bnb8(parts: Parts, rows: int, columns: int) -> np.ndarray:  # noqa: ARG001 - like the others
    scales = parts["SCB"].numpy() * np.float32(1 / 127)
    return parts["weight"].numpy().astype(np.float32) * scales[:, None]


def _awq_gemv(weight: Tensor) -> Parts:
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


def _read_awq_gemv(parts: Parts, rows: int, columns: int) -> np.ndarray:  # noqa: ARG001 - like the others
    groups = columns // fitting_group(columns, 32)
    zero = fields_of(parts["qzeros"], 4, groups)
    return _affine(fields_of(parts["qweight"], 4, columns), zero, floats(parts["scales"])[:, :groups], None)


def _modelopt_int4(weight: Tensor, smooth: bool = False) -> Parts:
    columns = weight.shape[1]
    factors = torch.linspace(0.5, 2.0, columns).half() if smooth else None
    weight = weight if factors is None else weight / factors.float()
    runs = torch.arange(columns) // fitting_group(columns, 128)
    codes, scale, _ = rounded_ints(weight, 4, runs, False, torch.float16)
    fields = codes - 8 & 15
    parts = {"weight": (fields[0::2] | fields[1::2] << 4).to(torch.uint8), "weight_scale": scale}
    return parts if factors is None else parts | {"pre_quant_scale": factors}


def _read_modelopt_int4(parts: Parts, rows: int, columns: int) -> np.ndarray:
    packed = parts["weight"].numpy().astype(np.int64)
    fields = np.stack([packed & 15, packed >> 4], 1).reshape(rows, columns)
    scale = floats(parts["weight_scale"])
    values = np.where(fields > 7, fields - 16, fields).astype(np.float32)
    values = values * spread(scale, rows, columns, (1, columns // scale.shape[1]))
    return values * (floats(parts["pre_quant_scale"]) if "pre_quant_scale" in parts else 1)


def _torchao_int8(weight: Tensor) -> Parts:
    parts = _pack_quantized(8, 32, weight)
    codes = fields_of(parts["weight_packed"], 8, weight.shape[1]) - 128
    return {
        "_weight_qdata": torch.from_numpy(codes).to(torch.int8),
        "_weight_scale": parts["weight_scale"],
        "_weight_zero_point": torch.zeros(parts["weight_scale"].shape, dtype=torch.int8),
    }


def _read_torchao_int8(parts: Parts, rows: int, columns: int) -> np.ndarray:
    scale, zero = floats(parts["_weight_scale"]), parts["_weight_zero_point"].numpy()
    block = (1, columns // scale.shape[1])
    codes = parts["_weight_qdata"].numpy() - spread(zero, rows, columns, block)
    return codes.astype(np.float32) * spread(scale, rows, columns, block)


def _torchao_int4(weight: Tensor) -> Parts:
    columns = weight.shape[1]
    blocks = weight.unflatten(1, (-1, fitting_group(columns, 32)))
    low = blocks.amin(2)
    scale = _step(blocks.amax(2) - low, 15, torch.bfloat16)
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


def _read_torchao_int4(parts: Parts, rows: int, columns: int) -> np.ndarray:
    packed = parts["_weight_qdata"].numpy().astype(np.int64)
    fields = np.stack([packed & 15, packed >> 4], -1).reshape(rows, columns)
    scale, zero = (floats(parts[name]).T for name in ("_weight_scale", "_weight_zero_point"))
    block = (1, columns // scale.shape[1])
    codes = np.where(fields > 7, fields - 16, fields).astype(np.float32)
    return codes * spread(scale, rows, columns, block) + spread(zero, rows, columns, block)


def _torchao_fp8(weight: Tensor) -> Parts:
    parts = _fp8_channel(weight)
    return {"_weight_qdata": parts["weight"], "_weight_scale": parts["weight_scale"]}


def _read_torchao_fp8(parts: Parts, rows: int, columns: int) -> np.ndarray:
    named = {"weight": parts["_weight_qdata"], "weight_scale": parts["_weight_scale"]}
    return _read_fp8(named, rows, columns)


def _unrounded_int4(weight: Tensor) -> Parts:
    runs = torch.arange(weight.shape[1]) // fitting_group(weight.shape[1], 32)
    _, scale, _ = rounded_ints(weight, 4, runs, False, torch.float32)
    return {"weight": weight, "weight_scale": scale}


def _read_unrounded_int4(parts: Parts, rows: int, columns: int) -> np.ndarray:
    scale = parts["weight_scale"].numpy()
    each = spread(scale, rows, columns, (1, columns // scale.shape[1]))
    return np.clip(np.round(parts["weight"].numpy() / each), -8, 7) * each


def _unrounded_fp8(weight: Tensor) -> Parts:
    return {"weight": weight, "weight_scale": _fp8_channel(weight)["weight_scale"]}


def _read_unrounded_fp8(parts: Parts, rows: int, columns: int) -> np.ndarray:
    scaled = parts["weight"] / parts["weight_scale"]
    return _read_fp8({"weight": _e4m3(scaled), "weight_scale": parts["weight_scale"]}, rows, columns)


MX_NAMES = {
    "mxfp4_compressed": ("weight_packed", "weight_scale", 4),
    "mxfp4_modelopt": ("weight", "weight_scale", 4),
    "mxfp4_blocks": ("blocks", "scales", 4),
    "mxfp4_mlx": ("weight", "scales", 4),
    "mxfp8_compressed": ("weight", "weight_scale", 8),
    "mxfp8_mlx": ("weight", "scales", 8),
}
FORMATS: dict[str, tuple[Callable[..., Parts], Callable[..., np.ndarray]]] = {
    "fp8_block": (_fp8_block, _read_fp8),
    "fp8_channel": (_fp8_channel, _read_fp8),
    "fp8_e5m2": (_fp8_e5m2, _read_fp8),
    "fp8_tensor": (_fp8_tensor, _read_fp8),
    "fp8_static": (_static, _read_fp8),
    "nvfp4_modelopt": (partial(_nvfp4, "weight", "weight_scale_2"), _read_nvfp4),
    "nvfp4_compressed": (partial(_nvfp4, "weight_packed", "weight_global_scale"), _read_nvfp4),
    "int4_g32": (partial(_pack_quantized, 4, 32), _read_ints),
    "int4_g64": (partial(_pack_quantized, 4, 64), _read_ints),
    "int4_g128": (partial(_pack_quantized, 4, 128), _read_ints),
    "int4_asym": (partial(_pack_quantized, 4, 32, asymmetric=True), _read_ints),
    "int4_actorder": (partial(_pack_quantized, 4, 32, shuffled=True), _read_ints),
    "int8_channel": (_int8_channel, _read_ints),
    "int8_pack": (partial(_pack_quantized, 8, 128), _read_ints),
    "awq": (_awq, _read_awq),
    "gptq_v1": (partial(_gptq, 1), partial(_read_gptq, 1)),
    "gptq_v2": (partial(_gptq, 0), partial(_read_gptq, 0)),
    "gptq_actorder": (partial(_gptq, 1, shuffled=True), partial(_read_gptq, 1)),
    "mlx4": (partial(_mlx, 4), _read_mlx),
    "mlx8": (partial(_mlx, 8), _read_mlx),
    "gptq3": (partial(_gptq, 1, bits=3), partial(_read_gptq, 1, bits=3)),
    **{how: (partial(_mx, *names), partial(_read_mx, *names)) for how, names in MX_NAMES.items()},
    "nvfp4_mlx": (_nvfp4_mlx, _read_nvfp4_mlx),
    "nf4": (_nf4, _read_nf4),
    "nf4_nested": (partial(_nf4, nested=True), _read_nf4),
    "bnb8": (_bnb8, _read_bnb8),
    "awq_gemv": (_awq_gemv, _read_awq_gemv),
    "modelopt_int4": (_modelopt_int4, _read_modelopt_int4),
    "modelopt_int4_smooth": (partial(_modelopt_int4, smooth=True), _read_modelopt_int4),
    "torchao_int8": (_torchao_int8, _read_torchao_int8),
    "torchao_int4": (_torchao_int4, _read_torchao_int4),
    "torchao_fp8": (_torchao_fp8, _read_torchao_fp8),
    "unrounded_int4": (_unrounded_int4, _read_unrounded_int4),
    "unrounded_fp8": (_unrounded_fp8, _read_unrounded_fp8),
}
