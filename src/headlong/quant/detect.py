"""Which family a module's parts belong to. Each family is asked; every part must be read or left alone knowingly.

Knows dtypes and shapes; no files, no names of modules, no values.
"""

from collections.abc import Mapping
from typing import Any

from headlong.errors import CheckpointError
from headlong.quant import bitsandbytes, scaled_inputs, torchao
from headlong.quant.awq import AwqFormat
from headlong.quant.awq_gemv import AwqGemvFormat
from headlong.quant.compressed import CompressedInts
from headlong.quant.format import Format, Part, Shape
from headlong.quant.fp8 import Fp8Format
from headlong.quant.gguf import GgufBlocks
from headlong.quant.gptq import GptqFormat
from headlong.quant.mlx import MlxFormat
from headlong.quant.modelopt_ints import ModeloptInts
from headlong.quant.mx import MxFormat
from headlong.quant.nvfp4 import Nvfp4Format
from headlong.quant.parts import ACTIVATION_PARTS, listed
from headlong.quant.plain import PlainFormat
from headlong.quant.quark_ints import QuarkInts
from headlong.quant.unrounded import Unrounded

FAMILIES = (
    bitsandbytes.Bnb4Format,
    bitsandbytes.Bnb8Format,
    torchao.TorchaoFormat,
    MxFormat,
    QuarkInts,
    Unrounded,
    PlainFormat,
    Fp8Format,
    ModeloptInts,
    Nvfp4Format,
    CompressedInts,
    AwqGemvFormat,
    GptqFormat,
    AwqFormat,
    MlxFormat,
)
"""The families whose matrices may consist of several parts, in the order in which they are asked."""

PART_NAMES: frozenset[str] = (
    frozenset(ACTIVATION_PARTS)
    | bitsandbytes.PARTS
    | {
        scaled_inputs.SCALES,
        torchao.CODES,
        torchao.SCALES,
        torchao.ZEROS,
        "blocks",
        "weight",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_packed",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight_global_scale",
        "qweight",
        "qzeros",
        "scale",
        "scales",
        "g_idx",
        "biases",
    }
)
"""Every suffix of a tensor's name that some format knows as a part."""


def detect(parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> Format:
    """The format of the [out, in] matrix stored as `parts`; `hint` decides only what they leave open.

    Raises `CheckpointError` with all parts in it if no family fits, or if a part is left that the family does not
    know.
    """
    try:
        found = _ask(parts, shape, hint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; stored are {listed(parts)}") from None
    if found is None:
        raise CheckpointError(f"no format is known that stores a {list(shape)} weight as {listed(parts)}")
    return found


def _ask(parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> Format | None:
    if scaled_inputs.SCALES in parts:
        rest = {name: part for name, part in parts.items() if name != scaled_inputs.SCALES}
        inner = _ask(rest, shape, hint)
        return None if inner is None else scaled_inputs.ScaledInputs.of(inner, parts, shape)
    for family in FAMILIES:
        found = family.detect(parts, shape, hint)
        if found is not None:
            left = sorted(parts.keys() - found.reads - found.unused.keys())
            if left:
                raise CheckpointError(f"{', '.join(left)} cannot be part of a {found.label} weight")
            return found
    return GgufBlocks.detect(parts, shape, hint)
