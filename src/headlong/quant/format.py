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
    """How a matrix is whole numbers: code · scale, plus an offset where there are any, by even groups of columns."""

    group: int
    lowest: int
    """Of all codes that may occur."""
    highest: int
    has_offsets: bool
    factors: Literal["float32", "float16", "parts"]
    """What scales and offsets are; `parts`: int8, times a float16 that `span` groups share."""
    span: int = 1


class Grouped(NamedTuple):
    """Some rows of such a matrix."""

    codes_RD: Tensor
    """int8 or uint8."""
    scales_RG: Tensor
    offsets_RG: Tensor | None
    scale_wholes_RW: Tensor | None = None
    """What `parts` are multiplied with."""
    offset_wholes_RW: Tensor | None = None


class PackedWeight(ABC):
    """A matrix [out_features, in_features] that stays in memory as it is stored."""

    format: "Format"
    out_features: int
    in_features: int

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held, for counting and for moving."""

    @abstractmethod
    def dequantize(self, first: int, last: int) -> Tensor:
        """The rows [first, last) as float32 [last - first, in_features], a new tensor on the weight's device."""

    def dequantize_rows(self, rows_N: Tensor) -> Tensor:
        """Any rows as float32 [N, in_features]; formats whose rows lie apart do better."""
        return torch.cat([self.dequantize(row, row + 1) for row in rows_N.tolist()])

    def grouping(self) -> Grouping | None:
        """None if it is not made of whole numbers by group."""
        return None

    def grouped(self, first: int, last: int) -> Grouped:  # noqa: ARG002
        """The rows [first, last) of one that has a grouping."""
        raise AssertionError(f"{self.format.label} weights are not whole numbers by group")

    def permuted(self, order: Tensor) -> "PackedWeight":  # noqa: ARG002
        """The same rows in another order. Asked only of what GGUF files hold."""
        raise AssertionError(f"{self.format.label} weights are never reordered")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device


class Format(ABC):
    """How one module is packed. Subclasses are frozen dataclasses whose fields are what varies (block, group, …)."""

    name: ClassVar[str]
    whole_numbers: ClassVar[bool] = False
    """Whether weights have a grouping, unless their columns were reordered."""
    unused: ClassVar[Mapping[str, str]] = {}
    """Parts that may be there and are left alone, with the reason."""

    @property
    @abstractmethod
    def label(self) -> str:
        """For people, short: `fp8 128x128`, `int4 group 128`, `Q4_K`."""

    @property
    @abstractmethod
    def bits(self) -> float:
        """Bits per weight, scales included."""

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
"""A matrix as layers and ops pass it on: plain, or packed."""
