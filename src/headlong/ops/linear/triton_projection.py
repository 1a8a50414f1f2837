"""A layer core's input projection as two GEMMs: what the core begins with, and the gates of what comes out of it.

Gates are needed last. So they are multiplied while the core is at work, which leaves the memory idle: the core asks for
them when it has launched what takes its time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headlong.ops.linear.linear import PendingProjection, Projected, Shard
from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_repack import shape_of
from headlong.ops.linear.triton_split_k import PartialSums
from headlong.ops.norm.normed import Normed
from headlong.quant.format import Weight


class TritonProjected(PendingProjection):
    """A projection of some tokens, whose GEMMs are launched when the core asks for them."""

    def __init__(self, given: Normed, first: TritonLinear, gates: TritonLinear | None) -> None:
        self._given, self._first, self._gates = given, first, gates

    def first(self) -> Tensor:
        """Computes all outputs but the gates."""
        return self._first(self._given)

    def partial_sums(self) -> PartialSums:
        """Computes all outputs but the gates, for kernels that add partial sums themselves."""
        return self._first.partial_sums(self._given)

    def gates(self, *, inputs_ready: bool = True) -> PartialSums | None:
        """Computes the gates, or None where there are none. Inputs are ready right after a kernel that waits before it
        launches its dependents."""
        return (
            None if self._gates is None else self._gates.partial_sums(self._given, inputs_ready=inputs_ready)
        )


class GivenProjected(PendingProjection):
    """A projection that somebody else has computed, gates among the rest."""

    def __init__(self, sums_NO: Tensor, gates: slice) -> None:
        self._sums_NO, self._gates = sums_NO, gates

    def first(self) -> Tensor:
        sums_NO, gates = self._sums_NO, self._gates
        return torch.cat([sums_NO[:, : gates.start], sums_NO[:, gates.stop :]], 1)

    def partial_sums(self) -> PartialSums:
        return PartialSums.whole(self.first())

    def gates(self, *, inputs_ready: bool = True) -> PartialSums | None:  # noqa: ARG002 - they are there
        gates_NO = self._sums_NO[:, self._gates]
        return PartialSums.whole(gates_NO) if gates_NO.shape[1] else None


def parts_of(given: Projected, gates: slice) -> TritonProjected | GivenProjected:
    """What a core is given, in the parts that it asks for: the gates are columns `gates` of all outputs."""
    if isinstance(given, Tensor):
        return GivenProjected(given, gates)
    assert isinstance(given, TritonProjected | GivenProjected)
    return given


class TritonProjection:
    """A core's input projection: it launches nothing before the core asks the `TritonProjected` it returns."""

    name = "triton"
    shard: Shard = Shard.NONE

    def __init__(
        self,
        weights: Sequence[Weight],
        order: Tensor | None,
        bias: Tensor | None,
        gates: slice,
        dtype: torch.dtype,
    ) -> None:
        """The arguments of a `TritonLinear`, of whose outputs `gates` are gates."""
        if order is None:
            order = torch.arange(sum(shape_of(weight)[0] for weight in weights))
        is_gate = torch.zeros(len(order), dtype=torch.bool)
        is_gate[gates] = True
        self.first = self._linear(weights, order, bias, ~is_gate, dtype)
        self.gates = self._linear(weights, order, bias, is_gate, dtype) if bool(is_gate.any()) else None

    @staticmethod
    def _linear(
        weights: Sequence[Weight], order: Tensor, bias: Tensor | None, wanted_O: Tensor, dtype: torch.dtype
    ) -> TritonLinear:
        bias = None if bias is None else bias[wanted_O.to(bias.device)]
        return TritonLinear(weights, order[wanted_O.to(order.device)], bias, dtype=dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that inputs are multiplied in."""
        return self.first.dtype

    def __call__(self, given: Normed) -> TritonProjected:
        return TritonProjected(given, self.first, self.gates)
