"""FP8: eight-bit floats times a scale per block, per row or for the whole matrix.

Whether it is called `weight_scale`, `weight_scale_inv` or `scale`, it multiplies. Activations stay in float, so their
static scales are left alone. Knows nothing of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, gcd
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import FloatCoding, Format, Gathered, Grouped, Part, Shape
from headlong.quant.gathered import regrouped
from headlong.quant.parts import (
    ACTIVATION_PARTS,
    SCALAR_SHAPES,
    SCALE_BITS,
    Rows,
    RowWeight,
    by_group,
    check_finite,
    check_sense,
    expect,
    row_numbers,
)

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")
OF_BLOCKS = ("weight_scale_inv", "scale")
"""What DeepSeek calls the scales of blocks, in V3 and in V4."""
USUAL_BLOCK = (128, 128)
LIKELY_SIDE = 16
"""What the sides of blocks are multiples of, where they are no powers of two."""

ROWS_AT_A_TIME = 1024
"""How many rows are looked through at a time for what is not finite."""
LEAST_NOT_FINITE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""The least byte, without its sign, that is infinite or NaN."""
MINUS_ZERO = 0x80
FP8_MAX = 448.0

Block = tuple[int, int]


@dataclass(frozen=True)
class Fp8Format(Format):
    """How one FP8 matrix is packed."""

    name = "fp8"
    reads: ClassVar[frozenset[str]] = frozenset({"weight", *SCALE_NAMES})
    unused = ACTIVATION_PARTS

    granularity: Literal["block", "channel", "tensor"]
    block: Block
    """How many rows and columns share a scale. Blocks at the edges may be cut off."""
    dtype: str = "F8_E4M3"
    scale_name: str = "weight_scale"
    scale_bits: int = 32

    @property
    def has_float_coding(self) -> bool:
        return True

    @property
    def label(self) -> str:
        kind = "fp8" if self.dtype == "F8_E4M3" else "fp8 e5m2"
        if self.granularity == "block":
            return f"{kind} {self.block[0]}x{self.block[1]}"
        return f"{kind} {self.granularity}"

    @property
    def bits(self) -> float:
        return 8 + self.scale_bits / (self.block[0] * self.block[1])

    @classmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "Fp8Format | None":
        if "weight" not in parts or parts["weight"].dtype not in FP8_DTYPES:
            return None
        weight = expect(parts, "weight", FP8_DTYPES, shape)
        names = [name for name in SCALE_NAMES if name in parts]
        if not names:
            raise CheckpointError("an FP8 weight needs weight_scale, weight_scale_inv or scale beside it")
        if len(names) > 1:
            raise CheckpointError(
                f"an FP8 weight has one scale, weight_scale, weight_scale_inv or scale, and here are "
                f"{' and '.join(names)}"
            )
        (name,) = names
        scale = expect(parts, name, (*SCALE_BITS, "U8"))
        granularity, block = _shared_by(
            name, scale.shape, (shape[0], shape[1]), hint.get("weight_block_size")
        )
        return cls(granularity, block, weight.dtype, name, SCALE_BITS.get(scale.dtype, 8))

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "Fp8Weight":
        out_features, in_features = shape
        rows, columns = self.block
        scale = parts[self.scale_name]
        scale = check_finite(
            self.scale_name, scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale
        )
        # Floats of five exponent bits may be as they were, without any scale to speak of.
        if scale.element_size() > 1 and scale.numel() and self.dtype == "F8_E4M3":
            check_sense(self.scale_name, float(scale.abs().max()) * FP8_MAX)
        grid = (ceil(out_features / rows), ceil(in_features / columns))
        weight = Fp8Weight(self, out_features, in_features, self.block, parts["weight"], scale.view(grid))
        weight.check_zero()
        return weight


def _shared_by(
    name: str, scale: Shape, shape: Block, hinted: Any
) -> tuple[Literal["block", "channel", "tensor"], Block]:
    out_features, in_features = shape
    known = [block for block in (_as_block(hinted), USUAL_BLOCK) if block is not None]
    fitting = [block for block in known if _grid(shape, block) == scale]
    # Under the block formats' own name a [1, 1] is one cut-off block; elsewhere it is a scale for all.
    if fitting and name in OF_BLOCKS:
        return "block", fitting[0]
    if scale in ((out_features,), (out_features, 1)):
        return "channel", (1, in_features)
    block = _as_block(hinted)
    # Smaller blocks than the config's are a choice, larger ones are scales that were lost.
    if name in OF_BLOCKS and block is not None and len(scale) == 2:
        wanted = _grid(shape, block)
        if any(found < least for found, least in zip(scale, wanted, strict=True)):
            raise CheckpointError(
                f"{name} has the shape {list(scale)}, which must be {list(wanted)} for blocks of {list(block)}"
            )
    if scale in SCALAR_SHAPES:
        return "tensor", (out_features, in_features)
    if fitting:
        return "block", fitting[0]
    if len(scale) == 2:
        rows, columns = _side(name, out_features, scale[0]), _side(name, in_features, scale[1])
        if rows and columns:
            return "block", (rows, columns)
    raise CheckpointError(
        f"{name} has the shape {list(scale)}, which is no scale per tensor, row or block of {list(shape)}"
    )


def _as_block(hinted: Any) -> Block | None:
    match hinted:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def _grid(shape: Block, block: Block) -> Shape:
    return (ceil(shape[0] / block[0]), ceil(shape[1] / block[1]))


def _side(name: str, size: int, blocks: int) -> int | None:
    """The side of blocks that no config tells: a power of two, or what cuts `size` evenly. Where these are two sides of
    more than one block, either may be meant."""
    power, even = _power_of_two(size, blocks), size // blocks if blocks and size % blocks == 0 else None
    if power and even and power != even and even % LIKELY_SIDE == 0 and blocks > 1:
        raise CheckpointError(
            f"{name} has {blocks} blocks for {size}, which are blocks of {even} or of {power}: give "
            "`weight_block_size` in quantization_config"
        )
    return power or even


def _power_of_two(size: int, blocks: int) -> int | None:
    """The smallest power of two that cuts `size` into so many blocks."""
    side = 1
    while ceil(size / side) > max(blocks, 1):
        side *= 2
    return side if ceil(size / side) == blocks else None


def decode_fp8(tensor: Tensor) -> Tensor:
    """A tensor of eight-bit floats as a new float32 tensor of the same shape."""
    codes = tensor.view(torch.uint8).reshape(-1).int()
    return _values(tensor.dtype, tensor.device).index_select(0, codes).view(tensor.shape)


@cache
def _values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The value of each of the 256 bytes. Looking values up is several times faster than PyTorch's conversion on a
    CPU."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().to(device)


@dataclass(frozen=True, eq=False)
class Fp8Weight(RowWeight):
    """One FP8 matrix in memory."""

    block: Block
    weight_OD: Tensor
    scale_RC: Tensor
    """The scales, one for each block of rows and columns."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight_OD, self.scale_RC)

    def unpack(self, rows: Rows) -> Tensor:
        values_ND = decode_fp8(self.weight_OD[rows])
        for values, scales in by_group(values_ND, self._scales(rows), self.block[1]):
            values.mul_(scales)
        return values_ND

    def float_coding(self) -> FloatCoding | None:
        return self._coding

    @cached_property
    def _coding(self) -> FloatCoding | None:
        group = self._group
        return FloatCoding(group, None, self.weight_OD.dtype) if group % 2 == 0 and self._finite else None

    @property
    def _group(self) -> int:
        """The number of columns that share a scale in every row and divide all columns."""
        return self.in_features if self.scale_RC.shape[1] == 1 else gcd(self.block[1], self.in_features)

    @cached_property
    def _finite(self) -> bool:
        least = LEAST_NOT_FINITE[self.weight_OD.dtype]
        return not any(
            bool((rows & 0x7F >= least).any())
            for rows in self.weight_OD.view(torch.uint8).split(ROWS_AT_A_TIME)
        )

    def check_zero(self) -> None:
        """An error where codes are those of e4m3fnuz, whose NaN is the minus zero of e4m3, and whose largest number is
        its NaN."""
        if self.weight_OD.dtype is not torch.float8_e4m3fn or self._finite:
            return
        if not bool((self.weight_OD.view(torch.uint8) == MINUS_ZERO).any()):
            raise CheckpointError(
                "weight holds NaN and no minus zero: it is in e4m3fnuz, which cannot be read, or damaged; "
                "convert it to e4m3fn"
            )

    def gathered(self) -> Gathered | None:
        if self._coding is not None or not self._finite:
            return None
        columns = torch.arange(self.in_features, device=self.device) // self._group
        return regrouped(self, columns, FloatCoding(self._group, None, self.weight_OD.dtype))

    def grouped(self, first: int, last: int) -> Grouped:
        scales_RC = self._scales(slice(first, last)).expand(last - first, -1)
        columns = torch.arange(0, self.in_features, self._group, device=self.device)
        return Grouped(
            self.weight_OD[first:last].view(torch.uint8), scales_RC[:, columns // self.block[1]], None
        )

    def _scales(self, rows: Rows) -> Tensor:
        per_scale = self.block[0]
        if self.scale_RC.shape[0] == 1:
            return self.scale_RC.float()
        if per_scale == 1:
            return self.scale_RC[rows].float()
        return self.scale_RC[row_numbers(rows, self.device) // per_scale].float()
