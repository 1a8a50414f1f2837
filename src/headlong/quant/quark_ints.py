"""Quark's four-bit integers: eight output features to a word as AWQ has them, under compressed-tensors' names.

`weight` [in, out/8], `weight_scale` and `weight_zero_point` by groups of inputs. Whether codes are below zero, and
whether the features of a word are in AWQ's order or in their own, no tensor says: the config must. Knows nothing of who
multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.awq import PER_WORD, PLACES, WIDTH, AwqWeight
from headlong.quant.format import Format, Part, Shape
from headlong.quant.ints import ints_label
from headlong.quant.parts import (
    SCALE_BITS,
    Rows,
    check_finite,
    even_group,
    expect,
    expect_grouped,
    expect_stated,
)

ORDERS = {"reorder": PLACES, "order": tuple(range(PER_WORD))}
"""Where in its word each feature lies, by the config's `pack_method`."""
DTYPES = ("uint4", "int4")


@dataclass(frozen=True)
class QuarkInts(Format):
    """How one such matrix is packed."""

    name = "quark"
    whole_numbers = True
    reads: ClassVar[frozenset[str]] = frozenset({"weight", "weight_scale", "weight_zero_point"})

    group: int
    columns: int
    signed: bool
    order: str
    zero_points: bool
    says_symmetric: bool = False
    """Whether the config says that codes are symmetric, whose zero points are stored all the same."""
    scale_bits: int = 16

    @property
    def label(self) -> str:
        more = ("asym",) if self.zero_points and not self.says_symmetric else ()
        return f"quark {ints_label(WIDTH, None if self.group == self.columns else self.group, *more)}"

    @property
    def bits(self) -> float:
        return WIDTH + (self.scale_bits + WIDTH * self.zero_points) / self.group

    @classmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "QuarkInts | None":
        out_features, in_features = shape
        words = out_features // PER_WORD
        weight = parts.get("weight")
        if weight is None or weight.dtype != "I32" or "weight_scale" not in parts:
            return None
        if out_features % PER_WORD or weight.shape != (in_features, words):
            return None
        scale, groups = expect_grouped(parts, "weight_scale", SCALE_BITS, out_features, axis=1)
        if "weight_zero_point" in parts:
            expect(parts, "weight_zero_point", ("I32",), (groups, words))
        expect_stated(parts, hint, zeros="weight_zero_point")
        dtype, order = hint.get("dtype"), hint.get("pack_method")
        if dtype not in DTYPES or order not in ORDERS:
            raise CheckpointError(
                f"weight can be read in several ways: quantization_config must say the dtype, one of "
                f"{', '.join(DTYPES)} (it says {dtype!r}), and the pack_method, one of {', '.join(ORDERS)} ({order!r})"
            )
        group = even_group("weight_scale", in_features, groups)
        zero_points = "weight_zero_point" in parts
        says = hint.get("symmetric") is True
        return cls(group, in_features, dtype == "int4", order, zero_points, says, SCALE_BITS[scale.dtype])

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "QuarkWeight":
        out_features, in_features = shape
        return QuarkWeight(
            self,
            out_features,
            in_features,
            group=self.group,
            g_idx=None,
            qweight_DW=parts["weight"],
            qzeros_GW=parts.get("weight_zero_point"),
            scales_GO=check_finite("weight_scale", parts["weight_scale"]),
            places=ORDERS[self.order],
            signed=self.signed,
        )


@dataclass(frozen=True, eq=False)
class QuarkWeight(AwqWeight):
    """One such matrix in memory."""

    signed: bool = False

    def codes(self, rows: Rows) -> Tensor:
        return self._numbers(super().codes(rows))

    def zeros(self, rows: Rows) -> Tensor | None:
        zeros_RG = super().zeros(rows)
        return None if zeros_RG is None else self._numbers(zeros_RG)

    def _numbers(self, fields: Tensor) -> Tensor:
        """Fields as the numbers they stand for."""
        return fields.add_(8).remainder_(16).sub_(8) if self.signed else fields
