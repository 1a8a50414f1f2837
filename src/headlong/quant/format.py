"""What a packed weight is: how it is recognised, which tensors it is made of, and how its rows are unpacked.

One file of this folder per family of formats. A `Format` is decided from dtypes and shapes alone, before anything is
read; a `PackedWeight` is one matrix in memory, as it was stored. Knows tensors; no files, no names of modules, and
nothing of who multiplies.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One tensor of a module as a header describes it: `dtype` in the safetensors spelling, or a GGUF block type."""

    dtype: str
    shape: Shape


class Grouping(NamedTuple):
    """How a matrix is made of integers: code · scale, plus an offset where there are any, by even groups of columns."""

    group: int
    lowest: int
    """The smallest code that may occur; `highest` is the largest."""
    highest: int
    has_offsets: bool
    factors: Literal["float32", "float16", "parts"]
    """What scales and offsets are stored as. `parts` are int8, each times a float16 that `span` groups share."""
    span: int = 1
    distinct: tuple[int, ...] = ()
    """The codes that may occur, where they are no more than sixteen of many; else empty."""


class FloatCoding(NamedTuple):
    """How a matrix is made of codes that stand for floats: value · scale, by even groups of columns."""

    group: int
    values: tuple[float, ...] | None
    """What the 16 codes of four bits stand for; None where codes are finite floats of eight bits."""
    dtype: torch.dtype = torch.float8_e4m3fn
    """Which floats of eight bits codes are."""


class Grouped(NamedTuple):
    """Some rows of a matrix that is made of codes by group: their codes, scales and offsets."""

    codes_RD: Tensor
    """The codes, int8 or uint8."""
    scales_RG: Tensor
    offsets_RG: Tensor | None
    scale_wholes_RW: Tensor | None = None
    """The float16 numbers that scales are multiplied with where they are stored as `parts`."""
    offset_wholes_RW: Tensor | None = None


class PackedWeight(ABC):
    """A matrix [out_features, in_features] that stays in memory as it is stored."""

    format: "Format"
    out_features: int
    in_features: int

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that the weight holds, for counting bytes and for moving it to a device."""

    @abstractmethod
    def dequantize(self, first: int, last: int) -> Tensor:
        """The rows [first, last) as float32 [last - first, in_features], a new tensor on the weight's device."""

    def dequantize_rows(self, rows_N: Tensor) -> Tensor:
        """The rows with these numbers as float32 [N, in_features]. Formats that can unpack single rows override
        this."""
        return torch.cat([self.dequantize(row, row + 1) for row in rows_N.tolist()])

    def grouping(self) -> Grouping | None:
        """How the weight is made of integers by group; None if it is not."""
        return None

    def float_coding(self) -> FloatCoding | None:
        """How the weight is made of codes that stand for floats; None if it is not."""
        return None

    def grouped(self, first: int, last: int) -> Grouped:  # noqa: ARG002
        """The codes, scales and offsets of the rows [first, last). Called only where there is a grouping or a
        coding, of this weight or of it gathered."""
        raise AssertionError(f"{self.format.label} weights are not codes by group")

    def gathered(self) -> "Gathered | None":
        """The weight over inputs in another order, where that is made of codes by even groups and this one is not; else
        None."""
        return None

    def permuted(self, order: Tensor) -> "PackedWeight":  # noqa: ARG002
        """The weight with its rows in another order. Called only on weights of GGUF files."""
        raise AssertionError(f"{self.format.label} weights are never reordered")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device


class Gathered(NamedTuple):
    """A weight over gathered inputs: its input k is number `columns_K[k]` of the ordinary ones, 0 where that is
    negative, times `factors_K[k]` where there are factors."""

    weight: PackedWeight
    columns_K: Tensor
    """Every column once, int32."""
    factors_K: Tensor | None = None


class Format(ABC):
    """How one module is packed. Subclasses are frozen dataclasses whose fields are what varies (block, group, …)."""

    name: ClassVar[str]
    whole_numbers: ClassVar[bool] = False
    """Whether weights of this family have a grouping, perhaps with their columns in another order."""
    unused: ClassVar[Mapping[str, str]] = {}
    """The parts that may be present and are not read, each with the reason."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name for people: `fp8 128x128`, `int4 group 128`, `Q4_K`."""

    @property
    @abstractmethod
    def bits(self) -> float:
        """How many bits a weight takes, scales included."""

    @property
    def has_float_coding(self) -> bool:
        """Whether weights of this format have a coding, perhaps with columns added that do not exist."""
        return False

    @classmethod
    @abstractmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "Format | None":
        """The format of a [out, in] matrix stored as `parts`; None if it is none of this family.

        Raises `CheckpointError` where it is of this family but does not fit: a scale of the wrong shape, a part
        missing. `hint` is what the quantisation config says of the module; it decides only what parts cannot.
        """

    @abstractmethod
    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> PackedWeight:
        """The weight over tensors of the shapes `detect` saw, taken as they are, not copied.

        Raises `CheckpointError` for values that cannot be: scales that are not finite, indices out of range.
        """


Weight = Tensor | PackedWeight
"""A matrix as layers and ops pass it on: a plain tensor, or a packed weight."""
