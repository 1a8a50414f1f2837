"""The block types of GGUF files as one family: rows of blocks, each block with its own scales.

A row is a whole number of blocks, so rows can be cut out and reordered without unpacking. How a block's bytes become
numbers is in `gguf_blocks.py`. Knows nothing of the container, of tensor names or of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Format, Grouped, Grouping, PackedWeight, Part, Shape
from headlong.quant.gguf_blocks import fields, unpack
from headlong.quant.gguf_grids import iq1_m_scale

BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
}
"""How many elements and how many bytes one block of each type has."""

_FLOAT16_AT: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""The offsets in a block at which its float16 fields lie; every other byte pattern is a valid number."""
_EXPONENT = 0x7C00
"""The exponent bits of a float16 that is infinite or NaN."""
LARGEST_POWER = 252
"""The largest exponent of an MXFP4 block whose values are all finite."""


_EIGHTHS = (-9, -7, -1, 1, 7, 9)
_OF_IQ2 = (-43, -25, -8, 8, 25, 43)
_OF_IQ3_XXS = tuple(sign * size for size in (4, 12, 20, 28, 36, 44, 52, 62) for sign in (-1, 1))
_ODD = tuple(range(-15, 16, 2))
_DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12)
"""The codes of types with few of them."""

GROUPINGS = {
    "Q4_0": Grouping(32, -8, 7, has_offsets=False, factors="float16"),
    "Q4_1": Grouping(32, 0, 15, has_offsets=True, factors="float16"),
    "Q5_0": Grouping(32, -16, 15, has_offsets=False, factors="float16"),
    "Q5_1": Grouping(32, 0, 31, has_offsets=True, factors="float16"),
    "Q8_0": Grouping(32, -128, 127, has_offsets=False, factors="float16"),
    "Q2_K": Grouping(16, 0, 3, has_offsets=True, factors="parts", span=16),
    "Q3_K": Grouping(16, -4, 3, has_offsets=False, factors="parts", span=16),
    "Q4_K": Grouping(32, 0, 15, has_offsets=True, factors="parts", span=8),
    "Q5_K": Grouping(32, 0, 31, has_offsets=True, factors="parts", span=8),
    "Q6_K": Grouping(16, -32, 31, has_offsets=False, factors="parts", span=16),
    "IQ4_NL": Grouping(32, -127, 113, has_offsets=False, factors="float16"),
    "IQ4_XS": Grouping(32, -127, 113, has_offsets=False, factors="parts", span=8),
    "IQ1_S": Grouping(32, -9, 9, has_offsets=False, factors="float32", distinct=_EIGHTHS),
    "IQ1_M": Grouping(16, -9, 9, has_offsets=False, factors="float32", distinct=_EIGHTHS),
    "IQ2_XXS": Grouping(32, -43, 43, has_offsets=False, factors="float32", distinct=_OF_IQ2),
    "IQ2_XS": Grouping(16, -43, 43, has_offsets=False, factors="float32", distinct=_OF_IQ2),
    "IQ2_S": Grouping(16, -43, 43, has_offsets=False, factors="float32", distinct=_OF_IQ2),
    "IQ3_XXS": Grouping(32, -62, 62, has_offsets=False, factors="float32", distinct=_OF_IQ3_XXS),
    "IQ3_S": Grouping(32, -15, 15, has_offsets=False, factors="float32", distinct=_ODD),
    "TQ1_0": Grouping(256, -1, 1, has_offsets=False, factors="float16"),
    "TQ2_0": Grouping(256, -1, 2, has_offsets=False, factors="float16"),
    "MXFP4": Grouping(32, -12, 12, has_offsets=False, factors="float32", distinct=_DOUBLED_E2M1),
}
"""How each block type is made of integers."""


class GgufWeight(PackedWeight):
    """One matrix in memory: rows of blocks, as in the file."""

    def __init__(self, format: "GgufBlocks", data: Tensor, in_features: int):
        """`data` is uint8 [out_features, bytes per row], contiguous; it is kept, not copied."""
        self.format = self._blocks = format
        self.data = data
        self.out_features = data.shape[0]
        self.in_features = in_features

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)

    def dequantize(self, first: int, last: int) -> Tensor:
        return self._unpacked(self.data[first:last])

    def dequantize_rows(self, rows_N: Tensor) -> Tensor:
        return self._unpacked(self.data.index_select(0, rows_N))

    def grouping(self) -> Grouping:
        return GROUPINGS[self._blocks.type_name]

    def grouped(self, first: int, last: int) -> Grouped:
        codes, scale, offset = fields(self._blocks_of(self.data[first:last]), self._blocks.type_name)
        if codes.is_floating_point():
            codes = codes.to(torch.int8)
        by_row = (last - first, -1)
        factors: list[Tensor | None] = []
        for factor in (scale, offset):
            parts = None if factor is None else factor.parts_NG
            factors.append(
                None if factor is None else (factor.whole_N if parts is None else parts).reshape(by_row)
            )
            factors.append(None if factor is None or parts is None else factor.whole_N.reshape(by_row))
        scales, scale_wholes, offsets, offset_wholes = factors
        assert scales is not None
        return Grouped(codes.reshape(by_row), scales, offsets, scale_wholes, offset_wholes)

    def permuted(self, order: Tensor) -> "GgufWeight":
        """The same weight with row `order[i]` in place i; copies the rows, unpacks nothing."""
        return GgufWeight(self._blocks, self.data.index_select(0, order), self.in_features)

    def _unpacked(self, rows: Tensor) -> Tensor:
        return unpack(self._blocks_of(rows), self._blocks.type_name).view(len(rows), self.in_features)

    def _blocks_of(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self._blocks.block_bytes)


@dataclass(frozen=True)
class GgufBlocks(Format):
    """The format of matrices that consist of one block type, a key of `BLOCK_SIZES`."""

    name: ClassVar[str] = "gguf"
    whole_numbers = True
    type_name: str

    @property
    def label(self) -> str:
        return self.type_name

    @property
    def bits(self) -> float:
        return self.block_bytes * 8 / self.block_elements

    @property
    def block_elements(self) -> int:
        return BLOCK_SIZES[self.type_name][0]

    @property
    def block_bytes(self) -> int:
        return BLOCK_SIZES[self.type_name][1]

    @classmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "GgufBlocks | None":
        if parts.keys() != {"weight"} or (part := parts["weight"]).dtype not in BLOCK_SIZES:
            return None
        if part.shape != shape:
            raise CheckpointError(f"weight: stored as {list(part.shape)}, but the model needs {list(shape)}")
        format = cls(part.dtype)
        if len(shape) != 2 or shape[1] % format.block_elements:
            raise CheckpointError(
                f"weight: {list(shape)} cannot be {part.dtype}, "
                f"which takes rows of a multiple of {format.block_elements}"
            )
        return format

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> GgufWeight:
        data, num_blocks = parts["weight"], shape[1] // self.block_elements
        assert data.dtype == torch.uint8 and data.is_contiguous()
        assert tuple(data.shape) == (shape[0], num_blocks * self.block_bytes)
        scales = self._scales(data)
        # By their bits: of the library's own test for float16 this takes a tenth.
        exponents = scales & _EXPONENT
        if exponents.numel() and exponents.max() == _EXPONENT:
            place = (exponents == _EXPONENT).nonzero()[0].tolist()
            row, block = divmod(place[1], num_blocks)
            value = scales.view(torch.float16)[*place].item()
            raise CheckpointError(
                f"weight: a scale of block {block} in row {row} is {value}; the file is damaged, fetch it again"
            )
        return GgufWeight(self, data, shape[1])

    def _scales(self, data: Tensor) -> Tensor:
        """The bits of every float16 that a block's scales are made of, int16 [fields, blocks], brought together."""
        blocks = data.view(-1, self.block_bytes)
        if self.type_name == "IQ1_M":
            return iq1_m_scale(blocks).view(torch.int16)[None]
        if self.type_name == "MXFP4":
            # A power of two that twelve halves of it are beyond float32 counts as infinite.
            beyond = torch.full((), _EXPONENT, dtype=torch.int16)
            return torch.where(blocks[:, 0] > LARGEST_POWER, beyond.to(data.device), 0)[None]
        places = _FLOAT16_AT[self.type_name]
        halves = data.view(torch.int16).view(-1, self.block_bytes // 2).T
        return halves[places[0] // 2 : places[-1] // 2 + 1].contiguous()
