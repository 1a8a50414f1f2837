"""bitsandbytes: four-bit codes of a table (nf4, fp4) with a largest magnitude for each block, and int8 by rows.

A matrix is one run of codes, two to a byte, the first in the high half. Largest magnitudes may be packed themselves:
bytes of a second table, by blocks of their own, plus an offset. Knows nothing of who multiplies.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.compressed import CompressedIntsWeight
from headlong.quant.format import FloatCoding, Format, Grouped, Part, Shape
from headlong.quant.ints import lookup_nibbles, split_nibbles
from headlong.quant.parts import Rows, RowWeight, by_group, check_finite, expect, row_numbers

KINDS = ("nf4", "fp4")
NF4_TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4_TABLE = tuple(sign * number / 192 for sign in (1, -1) for number in (0, 1, 128, 192, 64, 96, 32, 48))
"""What codes stand for in files as bitsandbytes writes them; a file brings its own table, which may be another."""
STATE = "weight.quant_state.bitsandbytes__"
BLOCKS = tuple(1 << power for power in range(5, 13))
NESTED_BLOCKS = (256, *BLOCKS)
"""Sizes of blocks of largest magnitudes, the usual one first."""
_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4}
_ABSMAX, _TABLE = "weight.absmax", "weight.quant_map"
_NESTED_ABSMAX, _NESTED_TABLE = "weight.nested_absmax", "weight.nested_quant_map"
PARTS = frozenset(
    {
        _ABSMAX,
        _TABLE,
        _NESTED_ABSMAX,
        _NESTED_TABLE,
        "SCB",
        "weight_format",
        *(STATE + kind for kind in KINDS),
    }
)


@dataclass(frozen=True)
class Bnb4Format(Format):
    """How one four-bit matrix is packed."""

    name = "bitsandbytes"
    kind: str
    block: int
    """How many codes share a largest magnitude."""
    nested: int = 0
    """How many packed largest magnitudes share one of their own; 0 if they are floats."""

    @property
    def reads(self) -> frozenset[str]:
        nested = {_NESTED_ABSMAX, _NESTED_TABLE} if self.nested else set[str]()
        return frozenset({"weight", _ABSMAX, _TABLE, STATE + self.kind} | nested)

    @property
    def has_float_coding(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"{self.kind} block {self.block}{' nested' if self.nested else ''}"

    @property
    def bits(self) -> float:
        each = 8 + 32 / self.nested if self.nested else 32
        return 4 + each / self.block

    @classmethod
    def detect(
        cls,
        parts: Mapping[str, Part],
        shape: Shape,
        hint: Mapping[str, Any],
    ) -> "Bnb4Format | None":
        kinds = [kind for kind in KINDS if STATE + kind in parts]
        if _ABSMAX not in parts and not kinds:
            return None
        if len(kinds) != 1:
            raise CheckpointError(
                f"a four-bit weight of bitsandbytes needs {STATE}nf4 or {STATE}fp4 beside it"
            )
        weight = expect(parts, "weight", _BYTES)
        if prod(weight.shape) * _BYTES[weight.dtype] * 2 != prod(shape) or shape[1] % 2:
            raise CheckpointError(
                f"weight is {weight.dtype} {list(weight.shape)}, which does not hold 4 bits of {list(shape)}"
            )
        absmax = expect(parts, _ABSMAX, ("F32", "U8"))
        expect(parts, _TABLE, ("F32",), (16,))
        block = _fitting(_ABSMAX, prod(shape), absmax, (64, *BLOCKS))
        if absmax.dtype == "F32":
            return cls(kinds[0], block)
        expect(parts, _NESTED_TABLE, ("F32",), (256,))
        nested = expect(parts, _NESTED_ABSMAX, ("F32",))
        return cls(kinds[0], block, _fitting(_NESTED_ABSMAX, prod(absmax.shape), nested, NESTED_BLOCKS))

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "Bnb4Weight":
        out_features, in_features = shape
        state = self._state(parts[STATE + self.kind], shape)
        offset = state.get("nested_offset") if self.nested else 0.0
        if not isinstance(offset, int | float):
            raise CheckpointError(
                f"{STATE}{self.kind} says nested_offset {offset!r}, which must be a number: without it largest "
                "magnitudes are others"
            )
        return Bnb4Weight(
            self,
            out_features,
            in_features,
            block=self.block,
            nested=self.nested,
            codes_OB=parts["weight"].view(torch.uint8).view(out_features, in_features // 2),
            absmax_G=parts[_ABSMAX].view(-1)
            if self.nested
            else check_finite(_ABSMAX, parts[_ABSMAX]).view(-1),
            table=tuple(check_finite(_TABLE, parts[_TABLE]).tolist()),
            nested_table=check_finite(_NESTED_TABLE, parts[_NESTED_TABLE]) if self.nested else None,
            nested_absmax=check_finite(_NESTED_ABSMAX, parts[_NESTED_ABSMAX]) if self.nested else None,
            offset=float(offset),
        )

    def _state(self, stored: Tensor, shape: Shape) -> dict[str, Any]:
        """What the file says of the packing, checked against what its tensors are."""
        try:
            state = json.loads(bytes(stored.cpu().tolist()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{STATE}{self.kind} is no JSON ({error}): the file is damaged") from None
        wanted = {"quant_type": self.kind, "blocksize": self.block, "shape": list(shape)}
        wanted |= {"nested_blocksize": self.nested} if self.nested else {}
        for key, value in wanted.items():
            said = state.get(key) if isinstance(state, dict) else None
            if said != value:
                raise CheckpointError(f"{STATE}{self.kind} says {key} {said!r} where tensors say {value!r}")
        return state


def _fitting(name: str, count: int, part: Part, blocks: tuple[int, ...]) -> int:
    for block in blocks:
        if ceil(count / block) == prod(part.shape):
            return block
    raise CheckpointError(
        f"{name} has the shape {list(part.shape)}, which no size of blocks gives for {count} codes"
    )


@dataclass(frozen=True, eq=False)
class Bnb4Weight(RowWeight):
    """One four-bit matrix in memory."""

    block: int
    nested: int
    codes_OB: Tensor
    absmax_G: Tensor
    """The largest magnitudes: floats, or bytes of `nested_table`."""
    table: tuple[float, ...]
    nested_table: Tensor | None
    nested_absmax: Tensor | None
    offset: float

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        held = (self.codes_OB, self.absmax_G, self.nested_table, self.nested_absmax)
        return tuple(tensor for tensor in held if tensor is not None)

    @property
    def device(self) -> torch.device:
        return self.codes_OB.device

    def unpack(self, rows: Rows) -> Tensor:
        packed_RB = self.codes_OB[rows]
        # The tables of `lookup_nibbles` take the low half first.
        values_RD = lookup_nibbles((packed_RB >> 4) | (packed_RB << 4), self.table)
        for values, factors in by_group(values_RD, self.magnitudes(rows), self._group):
            values.mul_(factors)
        return values_RD

    def float_coding(self) -> FloatCoding:
        return FloatCoding(self._group, self.table)

    @property
    def _group(self) -> int:
        """The number of columns that share a largest magnitude in every row: blocks may go over the ends of rows."""
        return gcd(self.block, self.in_features)

    def grouped(self, first: int, last: int) -> Grouped:
        rows = slice(first, last)
        packed_RB = self.codes_OB[rows]
        codes = split_nibbles((packed_RB >> 4) | (packed_RB << 4))
        return Grouped(codes, self.magnitudes(rows), None)

    def magnitudes(self, rows: Rows) -> Tensor:
        """The largest magnitudes [R, groups] of the groups of these rows."""
        columns = torch.arange(0, self.in_features, self._group, device=self.device)
        first_R1 = row_numbers(rows, self.device)[:, None] * self.in_features
        return self._absmax((first_R1 + columns) // self.block)

    def _absmax(self, groups: Tensor) -> Tensor:
        stored = self.absmax_G[groups]
        if self.nested_table is None or self.nested_absmax is None:
            return stored
        return self.nested_table[stored.int()] * self.nested_absmax[groups // self.nested] + self.offset


@dataclass(frozen=True)
class Bnb8Format(Format):
    """How one eight-bit matrix is packed: a code is code/127 of its row's largest magnitude."""

    name = "bitsandbytes"
    whole_numbers = True
    reads: ClassVar[frozenset[str]] = frozenset({"weight", "SCB", "weight_format"})

    columns: int

    @property
    def label(self) -> str:
        return "int8 channel"

    @property
    def bits(self) -> float:
        return 8 + 32 / self.columns

    @classmethod
    def detect(
        cls,
        parts: Mapping[str, Part],
        shape: Shape,
        hint: Mapping[str, Any],
    ) -> "Bnb8Format | None":
        if "SCB" not in parts:
            return None
        expect(parts, "weight", ("I8",), shape)
        expect(parts, "SCB", ("F32",), (shape[0],))
        return cls(shape[1])

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "Bnb8Weight":
        order = parts.get("weight_format")
        if order is not None and bool(order.ne(0).any()):
            raise CheckpointError("weight_format is not 0: codes in an order of their own cannot be read")
        out_features, in_features = shape
        return Bnb8Weight(
            self,
            out_features,
            in_features,
            group=in_features,
            g_idx=None,
            codes_OB=parts["weight"].view(torch.uint8),
            scale_OG=check_finite("SCB", parts["SCB"]).view(-1, 1),
            zero_point=None,
            width=8,
            packed=False,
        )


@dataclass(frozen=True, eq=False)
class Bnb8Weight(CompressedIntsWeight):
    """One eight-bit matrix in memory."""

    def scales(self, rows: Rows) -> Tensor:
        return super().scales(rows) * torch.tensor(1 / 127, device=self.device)
