"""What every family of formats does with stored parts: checks of headers and values, rows, factors by group.

Knows dtypes, shapes and values; nothing of how codes are packed.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Format, PackedWeight, Part, Shape

FLOAT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
SCALE_BITS = {"F32": 32, "F16": 16, "BF16": 16, "F8_E8M0": 8}
POWERS = ("U8", "F8_E8M0")
"""The dtypes that exponents are stored in: powers of two, a byte each."""
LARGEST_WEIGHT = 2.0**12
"""No matrix has weights as large. Scales of FP8 that are taken for their inverse make them so where the largest weight
is below 49, those of NVFP4 where it is below 1,764."""
SCALAR_SHAPES: tuple[Shape, ...] = ((), (1,), (1, 1))

_KEPT_IN_FLOAT = "it quantises activations, which Headlong keeps in float"
ACTIVATION_PARTS = {
    "input_scale": _KEPT_IN_FLOAT,
    "input_global_scale": _KEPT_IN_FLOAT,
    "input_zero_point": _KEPT_IN_FLOAT,
}

Rows = slice | Tensor
"""Some rows of a matrix, as a slice or as a tensor of row numbers."""


def listed(parts: Mapping[str, Part]) -> str:
    """A text that lists every part with its dtype and shape, for messages."""
    return ", ".join(f"{name} {part.dtype} {list(part.shape)}" for name, part in sorted(parts.items()))


def expect(parts: Mapping[str, Part], name: str, dtypes: Collection[str], *shapes: Shape) -> Part:
    """The part `name`, which must be there with one of these dtypes and, where any are given, shapes."""
    part = parts.get(name)
    if part is None:
        raise CheckpointError(f"{name} is missing")
    if part.dtype not in dtypes:
        raise CheckpointError(f"{name} is {part.dtype}, which must be {' or '.join(dtypes)}")
    if shapes and part.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"{name} has the shape {list(part.shape)}, which must be {wanted}")
    return part


def expect_grouped(
    parts: Mapping[str, Part], name: str, dtypes: Collection[str], num_outs: int, axis: int = 0
) -> tuple[Part, int]:
    """The part `name`, which must be a matrix with the outputs along `axis`, and the number of groups along the
    other."""
    part = expect(parts, name, dtypes)
    if len(part.shape) != 2 or part.shape[axis] != num_outs:
        wanted = f"[groups, {num_outs}]" if axis else f"[{num_outs}, groups]"
        have = "have" if name == "scales" else "has"
        raise CheckpointError(f"{name} {have} the shape {list(part.shape)}, which must be {wanted}")
    return part, part.shape[1 - axis]


def expect_stated(parts: Mapping[str, Part], hint: Mapping[str, Any], *, zeros: str, order: str = "") -> None:
    """An error where the config says of these codes what their parts lack: the weights would be read without it, as
    others that nobody meant. `zeros` and `order` name the parts that would hold zero points and the columns' groups."""
    if hint.get("symmetric") is False and zeros not in parts:
        raise CheckpointError(f"{zeros} is missing, and the config says that codes are not symmetric")
    if order and hint.get("desc_act") is True and order not in parts:
        raise CheckpointError(
            f"{order} is missing, and the config says that groups are in the order of activations"
        )


def check_sense(name: str, largest: float, *, divides: bool = False) -> None:
    """An error where the largest weight would be larger than any is, as it is where a scale is multiplied with that
    divides, or the other way round: no dtype and no shape tells the two apart."""
    if largest > LARGEST_WEIGHT:
        done, other = ("divides", "multiplies") if divides else ("multiplies", "divides")
        raise CheckpointError(
            f"{name} {done} here and would make weights as large as {largest:.3g}: it is one that {other}, or damaged"
        )


def even_group(name: str, columns: int, groups: int) -> int:
    """How many columns each of `groups` equal groups has; an error where they do not divide the columns evenly."""
    if groups < 1 or columns % groups:
        raise CheckpointError(f"{name} has {groups} groups, which do not divide {columns} input features")
    return columns // groups


def check_finite(name: str, tensor: Tensor) -> Tensor:
    """Returns `tensor` after checking that no value is infinite or NaN."""
    if tensor.element_size() == 1:
        codes = torch.arange(256, dtype=torch.uint8)
        wrong = codes[~codes.view(tensor.dtype).float().isfinite()].tolist()
        flat = tensor.view(torch.uint8)
        fine = not any(bool((flat == code).any()) for code in wrong)
    else:
        fine = bool(tensor.isfinite().all())
    if not fine:
        raise CheckpointError(f"{name} holds values that are not finite: the file is damaged")
    return tensor


def check_in_range(name: str, tensor: Tensor, first: int, last: int) -> Tensor:
    """Returns `tensor` after checking that its values lie in [first, last]."""
    if tensor.numel():
        low, high = (int(bound) for bound in tensor.aminmax())
        if low < first or high > last:
            raise CheckpointError(f"{name} runs from {low} to {high} and must lie in {first} to {last}")
    return tensor


def row_numbers(rows: Rows, device: torch.device) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.arange(rows.start, rows.stop, device=device)


def by_group(values_RD: Tensor, factors_RG: Tensor, group: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the values and of their groups' factors that broadcast together; the last group may be short."""
    whole = values_RD.shape[1] // group
    if whole:
        yield values_RD[:, : whole * group].unflatten(1, (whole, group)), factors_RG[:, :whole, None]
    if whole * group < values_RD.shape[1]:
        yield values_RD[:, whole * group :], factors_RG[:, whole:]


@dataclass(frozen=True, eq=False)
class RowWeight(PackedWeight):
    """A weight whose rows are unpacked the same way whether they follow each other or lie apart."""

    format: Format
    out_features: int
    in_features: int

    @abstractmethod
    def unpack(self, rows: Rows) -> Tensor:
        """The rows as a new float32 tensor [R, in_features]."""

    def dequantize(self, first: int, last: int) -> Tensor:
        return self.unpack(slice(first, last))

    def dequantize_rows(self, rows_N: Tensor) -> Tensor:
        return self.unpack(rows_N)
