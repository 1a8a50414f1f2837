"""Round-to-nearest quantisers: a float matrix in, the parts of a packed one out, named as on disk.

The parts are what compressed-tensors (or, for `fp8_block`, the FP8 releases of DeepSeek and Qwen) would hold, with
scales in the weight's own dtype. Knows nothing of calibration, of files or of configs.
"""

from collections.abc import Callable
from math import ceil
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from headlong.errors import ConfigError
from headlong.quant.compressed import CompressedInts
from headlong.quant.format import Format
from headlong.quant.fp8 import FP8_MAX, USUAL_BLOCK, Fp8Format

RtnFormat = Literal["fp8", "fp8_block", "int8", "int4"]
Parts = dict[str, Tensor]

GROUPS = (128, 64, 32, 16)
ROWS_AT_A_TIME = 4096
"""How many rows are in float32 at once: a multiple of a block's rows, and few beside the whole weight."""


def quantize(weight_OD: Tensor, name: RtnFormat, group_size: int = 128) -> tuple[Format, Parts]:
    """The format and the parts of a float matrix rounded to format `name`. The matrix must be finite and stays as it
    is.

    `group_size` is of int4 alone; if it does not divide the input features, a smaller one is taken that does, else
    a scale per row.
    """
    out_features, in_features = weight_OD.shape
    dtype = torch.float32 if weight_OD.dtype == torch.float64 else weight_OD.dtype
    scale_bits = 8 * dtype.itemsize
    match name:
        case "fp8":
            format = Fp8Format("channel", (1, in_features), scale_bits=scale_bits)
            parts = _by_rows(weight_OD, lambda rows_RD: _fp8_channel(rows_RD, dtype))
        case "fp8_block":
            format = Fp8Format("block", USUAL_BLOCK, scale_name="weight_scale_inv", scale_bits=scale_bits)
            parts = _by_rows(weight_OD, lambda rows_RD: _fp8_block(rows_RD, dtype))
        case "int8":
            format = CompressedInts(8, in_features, "channel", packed=False, scale_bits=scale_bits)
            parts = _by_rows(weight_OD, lambda rows_RD: _int8_channel(rows_RD, dtype))
        case "int4":
            group = _fitting_group(in_features, group_size)
            shared = "channel" if group == in_features else "group"
            format = CompressedInts(4, group, shared, packed=True, scale_bits=scale_bits)
            parts = _by_rows(weight_OD, lambda rows_RD: _int4_group(rows_RD, group, dtype))
            parts["weight_shape"] = torch.tensor([out_features, in_features])
        case _:
            raise ConfigError(f"quantisation to {name!r} is not known: choose fp8, fp8_block, int8 or int4")
    return format, parts


def _fitting_group(in_features: int, group_size: int) -> int:
    if group_size < 1:
        raise ConfigError(f"group_size is {group_size} and must be positive")
    dividing = (group for group in (group_size, *GROUPS) if in_features % group == 0)
    return next(dividing, in_features)


def _by_rows(weight_OD: Tensor, rounded: Callable[[Tensor], Parts]) -> Parts:
    pieces = [rounded(rows_RD.float()) for rows_RD in weight_OD.split(ROWS_AT_A_TIME)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _scale(largest: Tensor, steps: float, dtype: torch.dtype) -> Tensor:
    """The scale as it will be stored; 1 where all weights are 0 or too small for its dtype."""
    scale = (largest / steps).to(dtype)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _to_fp8(scaled: Tensor) -> Tensor:
    # Rounding the scale may push the largest weight beyond the range, where the conversion gives NaN.
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _fp8_channel(rows_RD: Tensor, dtype: torch.dtype) -> Parts:
    scale_R1 = _scale(rows_RD.abs().amax(dim=1, keepdim=True), FP8_MAX, dtype)
    return {"weight": _to_fp8(rows_RD / scale_R1.float()), "weight_scale": scale_R1}


def _fp8_block(rows_RD: Tensor, dtype: torch.dtype) -> Parts:
    num_rows, num_columns = rows_RD.shape
    height, width = USUAL_BLOCK
    down, across = ceil(num_rows / height), ceil(num_columns / width)
    padded = pad(rows_RD, (0, across * width - num_columns, 0, down * height - num_rows))
    blocks = padded.view(down, height, across, width)
    scale = _scale(blocks.abs().amax(dim=(1, 3)), FP8_MAX, dtype)
    codes = _to_fp8(blocks / scale.float()[:, None, :, None]).view(padded.shape)
    return {"weight": codes[:num_rows, :num_columns].contiguous(), "weight_scale_inv": scale}


def _to_ints(rows_RD: Tensor, group: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Signed codes as floats [R, D] and scales [R, groups]. The steps go from -half - 0.5 to half - 0.5."""
    half = 1 << (width - 1)
    groups_RGN = rows_RD.unflatten(1, (-1, group))
    scale_RG = _scale(groups_RGN.abs().amax(dim=2), half - 0.5, dtype)
    codes_RGN = (groups_RGN / scale_RG.float()[..., None]).round_().clamp_(-half, half - 1)
    return codes_RGN.flatten(1), scale_RG


def _int8_channel(rows_RD: Tensor, dtype: torch.dtype) -> Parts:
    codes_RD, scale_R1 = _to_ints(rows_RD, rows_RD.shape[1], 8, dtype)
    return {"weight": codes_RD.to(torch.int8), "weight_scale": scale_R1}


def _int4_group(rows_RD: Tensor, group: int, dtype: torch.dtype) -> Parts:
    codes_RD, scale_RG = _to_ints(rows_RD, group, 4, dtype)
    fields_RD = pad(codes_RD.add_(8).to(torch.uint8), (0, -codes_RD.shape[1] % 8))
    bytes_RB = fields_RD[:, 0::2] | fields_RD[:, 1::2] << 4
    return {"weight_packed": bytes_RB.view(torch.int32), "weight_scale": scale_RG}
