"""What formats of small integers share: unpacking fields of a few bits, and (code - zero) * scale by group.

Knows neither names of parts nor whose layout it is.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from headlong.errors import CheckpointError
from headlong.quant.format import Gathered, Grouped, Grouping
from headlong.quant.gathered import regrouped
from headlong.quant.parts import Rows, RowWeight, by_group, check_in_range

WORD_BITS = 32
ROWS_AT_A_TIME = 128
"""How many rows are unpacked at once while codes are extracted, so that little of a matrix is held as floats."""


def lookup_nibbles(packed_RB: Tensor, meaning: tuple[float, ...]) -> Tensor:
    """The values of both halves of each byte, the low one first, as float32 [R, 2B]."""
    pairs = _pairs(meaning, packed_RB.device).index_select(0, packed_RB.reshape(-1).int())
    return pairs.view(torch.float32).view(packed_RB.shape[0], -1)


def split_nibbles(packed_RB: Tensor) -> Tensor:
    """Both halves of each byte, the low one first, as bytes of their own [R, 2B]."""
    return torch.stack((packed_RB & 15, packed_RB >> 4), dim=2).flatten(1)


@cache
def _pairs(meaning: tuple[float, ...], device: torch.device) -> Tensor:
    """A table with the two floats of each byte in one int64, since one look-up is faster than two."""
    values, codes = torch.tensor(meaning), torch.arange(256)
    return torch.stack((values[codes & 15], values[codes >> 4]), dim=1).view(torch.int64).view(256).to(device)


def unpack_fields(packed_RB: Tensor, bits: int, count: int, lowest: int = 0) -> Tensor:
    """The first `count` fields of rows that are dense little-endian streams of bits, as float32 [R, count].

    A field of zeros means `lowest`.
    """
    if bits == 4:
        meaning = tuple(float(lowest + code) for code in range(16))
        return lookup_nibbles(packed_RB, meaning)[:, :count].contiguous()
    values_RN = packed_RB.float() if bits == 8 else _shifted_fields(packed_RB, bits)
    return values_RN[:, :count].contiguous().add_(lowest)


def _shifted_fields(packed_RB: Tensor, bits: int) -> Tensor:
    """The fields of each row as float32, for widths that do not fill bytes evenly. Bytes are taken in chunks at whose
    ends a field ends too: 8 fields of 3 bits in 3 bytes, 4 of 6 bits in 3, 4 of 2 bits in 1."""
    period = 8 // gcd(8, bits)
    chunk = bits * period // 8
    chunks_RCB = pad(packed_RB, (0, -packed_RB.shape[1] % chunk)).unflatten(1, (-1, chunk))
    values_RCP = packed_RB.new_empty((*chunks_RCB.shape[:2], period), dtype=torch.float32)
    for position in range(period):
        byte, shift = divmod(position * bits, 8)
        field = chunks_RCB[..., byte] >> shift
        if shift + bits > 8:
            field |= chunks_RCB[..., byte + 1] << (8 - shift)
        values_RCP[..., position] = field.bitwise_and_((1 << bits) - 1)
    return values_RCP.flatten(1)


def pick_fields(words_GW: Tensor, index_N: Tensor, bits: int, places: tuple[int, ...] = ()) -> Tensor:
    """The fields numbered `index_N` of each row of words, as float32 [N, G].

    `places` says where in its word a field lies, if not in the order of the numbers.
    """
    per_word = WORD_BITS // bits
    place_N = index_N % per_word
    if places:
        place_N = torch.tensor(places, device=place_N.device)[place_N]
    words_GN = words_GW[:, index_N // per_word]
    return words_GN.bitwise_right_shift_(bits * place_N.int()).bitwise_and_((1 << bits) - 1).t().float()


def pick_dense(words_GW: Tensor, index_N: Tensor, bits: int, count: int) -> Tensor:
    """The fields numbered `index_N`, of `count` in each row of words, as float32 [N, G]; fields may cross words."""
    if WORD_BITS % bits == 0:
        return pick_fields(words_GW, index_N, bits)
    streams_GB = words_GW.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return unpack_fields(streams_GB, bits, count)[:, index_N].t().contiguous()


def word_bits(words: int, count: int, allowed: tuple[int, ...], hinted: Any) -> int | None:
    """The width of fields of which `count` fill so many words; where several widths do, the one that the config
    names, and without one it is an error. Widths whose fields cross words are told from the others where words are
    full."""
    likely = [bits for bits in allowed if bits == hinted or WORD_BITS % bits == 0 or count % WORD_BITS == 0]
    fitting = [bits for bits in likely if ceil(count * bits / WORD_BITS) == words]
    if hinted not in fitting and len(fitting) > 1:
        raise CheckpointError(
            f"{words} words hold {count} codes of {fitting[0]} bits or of {fitting[1]}: give `bits` in "
            "quantization_config"
        )
    return hinted if hinted in fitting else fitting[0] if fitting else None


def fitting_group(name: str, columns: int, groups: int, hinted: Any, *, certain: bool = False) -> int:
    """How many columns each of `groups` groups has; the last may be short. The config decides where it fits; without
    one the columns are cut evenly or by a power of two, and where both are possible it is an error unless `certain`."""
    powers = [1 << power for power in range(columns.bit_length() + 1)]
    even = [columns // groups] if groups and columns % groups == 0 else []
    likely = [hinted] if isinstance(hinted, int) and hinted > 0 else []
    fitting = [min(group, columns) for group in (*likely, *even, *powers) if ceil(columns / group) == groups]
    if not fitting:
        raise CheckpointError(f"{name} have {groups} groups, which do not divide {columns} input features")
    if fitting[0] not in likely and groups > 1 and not certain and len(set(fitting)) > 1:
        raise CheckpointError(
            f"{name} have {groups} groups for {columns} input features, which are groups of {fitting[0]} or of "
            f"{fitting[1]}: give `group_size` in quantization_config"
        )
    return fitting[0]


@dataclass(frozen=True, eq=False)
class GroupedInts(RowWeight):
    """A matrix of (code - zero) * scale, where groups of columns share a zero point and a scale."""

    group: int
    g_idx: Tensor | None
    """The group of each column; None where groups are runs of columns."""

    @abstractmethod
    def codes(self, rows: Rows) -> Tensor:
        """The codes of these rows as a new float32 tensor [R, in_features]."""

    @abstractmethod
    def zeros(self, rows: Rows) -> Tensor | None:
        """The zero points of these rows, float32 [R, groups], or one row for all; None if all are 0."""

    @abstractmethod
    def scales(self, rows: Rows) -> Tensor:
        """The scales of these rows, float32 [R, groups], or one row for all."""

    def unpack(self, rows: Rows) -> Tensor:
        values_RD, zeros_RG, scales_RG = self.codes(rows), self.zeros(rows), self.scales(rows)
        if self.g_idx is not None:
            if zeros_RG is not None:
                values_RD.sub_(zeros_RG.index_select(1, self.g_idx))
            return values_RD.mul_(scales_RG.index_select(1, self.g_idx))
        if zeros_RG is not None:
            for values, zeros in by_group(values_RD, zeros_RG, self.group):
                values.sub_(zeros)
        for values, scales in by_group(values_RD, scales_RG, self.group):
            values.mul_(scales)
        return values_RD

    def grouping(self) -> Grouping | None:
        return self._codes_by_group if self._has_even_runs else None

    def gathered(self) -> Gathered | None:
        if self._has_even_runs and self.group % 2 == 0:
            return None
        runs = torch.arange(self.in_features, device=self.device) // self.group
        columns = runs if self.g_idx is None else self.g_idx.long()
        has_all = int(columns.max()) < self.scales(slice(0, 1)).shape[1]
        return regrouped(self, columns, self._codes_by_group) if has_all else None

    @property
    def _has_even_runs(self) -> bool:
        if self.g_idx is not None or self.in_features % self.group:
            return False
        return self.scales(slice(0, 1)).shape[1] == self.in_features // self.group

    @cached_property
    def _codes_by_group(self) -> Grouping:
        """What the codes are, wherever columns of a group lie."""
        rows, bounds = slice(0, 1), []
        for first in range(0, self.out_features, ROWS_AT_A_TIME):
            codes = self.codes(slice(first, min(first + ROWS_AT_A_TIME, self.out_features)))
            bounds.append([int(bound) for bound in codes.aminmax()])
        lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
        return Grouping(
            self.group, lowest, highest, has_offsets=self.zeros(rows) is not None, factors="float32"
        )

    def grouped(self, first: int, last: int) -> Grouped:
        rows = slice(first, last)
        codes, scales, zeros = self.codes(rows), self.scales(rows), self.zeros(rows)
        scales = scales.expand(last - first, -1)
        narrow = torch.int8 if self._codes_by_group.lowest < 0 else torch.uint8
        return Grouped(codes.to(narrow), scales, None if zeros is None else -zeros * scales)


def column_groups(name: str, parts: Mapping[str, Tensor], groups: int, group: int) -> Tensor | None:
    """The group of each column; None where the file's list only says that groups are runs of columns, as most lists
    do."""
    g_idx = parts[name]
    # All -1 is how some writers say that the order was never changed.
    if bool((g_idx == -1).all()):
        return None
    check_in_range(name, g_idx, 0, groups - 1)
    runs = torch.arange(g_idx.numel(), device=g_idx.device) // group
    return None if torch.equal(runs.to(g_idx.dtype), g_idx) else g_idx


def ints_label(bits: int, group: int | None, *more: str) -> str:
    """A format's label. `group` is None for a scale per row and 0 for a single scale."""
    shared = "channel" if group is None else f"group {group}" if group else "tensor"
    return " ".join((f"int{bits}", shared, *more))
