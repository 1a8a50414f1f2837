"""Codes, words, factors and small floats as every packed format has them, by their definitions, one by one."""

import numpy as np
import torch
from torch import Tensor

Parts = dict[str, Tensor]


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


def fitting_group(columns: int, wanted: int) -> int:
    while columns % wanted:
        wanted //= 2
    return wanted


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


def step(largest: Tensor, steps: float, dtype: torch.dtype) -> Tensor:
    return (largest / steps).clamp(min=1e-6).to(dtype)


def e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)


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
        scale = step(high - low, top, dtype)
        zero = (-low / scale.float()).round().clamp(first_zero, top)
    else:
        scale, zero = step(torch.maximum(-low, high), top / 2, dtype), half
    index = groups.long()
    codes = (weight / scale.float()[:, index]).round() + zero[:, index]
    return codes.clamp(0, top).long(), scale, zero.long()


def affine(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray, g_idx: Tensor | None) -> np.ndarray:
    columns = codes.shape[1]
    group = columns // scale.shape[1]
    of_column = [c // group for c in range(columns)] if g_idx is None else g_idx.tolist()
    return (codes - zero[:, of_column]).astype(np.float32) * scale[:, of_column]
