"""y = x Wᵀ on a GPU, for few tokens at the speed of its memory: each weight is read once, as narrow as it is stored.

Serves floats, FP8, NVFP4, and whole numbers with a scale by group. Several weights over one input, whose outputs may be
reordered, become one linear: those of one kind lie in one matrix, in the order of their outputs. A token's bits depend
on its own row alone.
"""

from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

from headlong.ops.linear import triton_split_k
from headlong.ops.linear.linear import Argmax, Linear, SiluMul
from headlong.ops.linear.triton_block_m import SURE, width_for
from headlong.ops.linear.triton_paired import Pair, add_both
from headlong.ops.linear.triton_repack import kind_of, matrices_of, picked, shape_of
from headlong.ops.linear.triton_split_k import Pieces
from headlong.ops.linear.triton_weight import FEW, Matrix
from headlong.ops.norm.normed import Norm, Normed, PartialNorm
from headlong.ops.norm.triton import half_normed_room, to_multiply
from headlong.quant.format import Weight

WORKSPACE = 1 << 26
"""Numbers that pieces of sums may take; more tokens go in several launches."""


class TritonLinear(Linear):
    name = "triton"

    def __init__(
        self,
        weights: Sequence[Weight],
        order: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Output i is row `order[i]` of the weights one below the other, plus `bias[i]`; rows that are not in the order
        are left out. Packed weights are multiplied in `dtype`, others in their own."""
        self.in_features = shape_of(weights[0])[1]
        rows = sum(shape_of(weight)[0] for weight in weights)
        self.out_features = rows if order is None else len(order)
        self.bias = None if bias is None else bias.to(weights[0].device).contiguous()
        self.matrices = matrices_of(weights, order, dtype)
        self.dtype = self.matrices[0].dtype
        """What inputs are multiplied in."""
        self._pair = Pair.of(self.matrices)
        most = max(matrix.num_pieces * matrix.outs for matrix in self.matrices)
        self._tokens_at_once = min(max(WORKSPACE // most, SURE), 1 << 15)

    @staticmethod
    def supports(weight: Weight) -> str | None:
        """None if it can be among the weights, else the reason why not."""
        if weight.device.type == "meta":
            return "the weight is not there"
        kind = kind_of(weight)
        return kind if isinstance(kind, str) else None

    def __call__(self, given: Normed, add_to: Tensor | None = None) -> Tensor:
        """float32 [N, out]; plus `add_to`, of the same shape and dtype."""
        return self._added(given, add_to, None)[0]

    def add_to(self, given: Normed, residual_ND: Tensor, then: Norm) -> tuple[Tensor, Normed]:
        """In one launch; what `then` makes of it may be left in part to the GEMM that takes it."""
        out_ND, normed = self._added(given, residual_ND, then)
        return out_ND, then(out_ND) if normed is None else normed

    def _added(
        self, given: Normed, add_to: Tensor | None, then: Norm | None
    ) -> tuple[Tensor, PartialNorm | None]:
        x_ND, _ = to_multiply(given)
        out_NO = x_ND.new_empty((len(x_ND), self.out_features), dtype=torch.float32)
        residual_NO = None if add_to is None else add_to.contiguous()
        room = None
        if self._whole is not None and not self._whole.is_whole:
            room = half_normed_room(then, out_NO)
        for part, x, half in self._launches(given):
            if self._pair is not None and add_to is None and len(x) <= FEW:
                add_both(self._pair, x, self.bias, half, out_NO[part])
                continue
            residual = None if residual_NO is None else residual_NO[part]
            put = None if room is None else room.some(part)
            for matrix in self.matrices:
                triton_split_k.add(
                    matrix, x, width_for(len(x), matrix), self.bias, residual, out_NO[part], half, then, put
                )
        return out_NO, room

    def gated(self, given: Normed, silu_mul: SiluMul, dtype: torch.dtype) -> Tensor:
        whole = self._whole
        if whole is None:
            return silu_mul(self(given))
        x_ND, _ = to_multiply(given)
        out_NI = x_ND.new_empty((len(x_ND), self.out_features // 2), dtype=dtype)
        for part, x, half in self._launches(given):
            triton_split_k.gate(whole, x, width_for(len(x), whole), self.bias, out_NI[part], half)
        return out_NI

    def argmax(self, x_ND: Tensor, argmax: Argmax) -> Tensor:
        whole = self._whole
        if whole is None:
            return argmax(self(x_ND))
        found_N = x_ND.new_empty(len(x_ND), dtype=torch.long)
        for part, x, _ in self._launches(x_ND):
            triton_split_k.best(whole, x, width_for(len(x), whole), self.bias, found_N[part])
        return found_N

    def pieces(self, given: Normed, *, known: bool = False) -> Pieces:
        """What `__call__` gives, for kernels that add its pieces themselves; where that would take too much memory, or
        there is more to it than a sum, they are added. `known` says that the inputs were there before what was
        launched last began, and that it waited before it let others start."""
        whole, (x_ND, half) = self._whole, to_multiply(given)
        if whole is None or self.bias is not None or len(x_ND) > self._tokens_at_once:
            return Pieces.whole(self(given))
        fitting_ND = x_ND.to(self.dtype).contiguous()
        known = known and fitting_ND is x_ND  # else it is only just being made
        return Pieces.of(whole, whole.multiply(fitting_ND, width_for(len(x_ND), whole), known=known), half)

    def _launches(self, given: Normed) -> Iterator[tuple[slice, Tensor, PartialNorm | None]]:
        """The tokens that go at once, what they are multiplied as, and what that is half of."""
        x_ND, half = to_multiply(given)
        x_ND = x_ND.to(self.dtype).contiguous()
        for first in range(0, len(x_ND), self._tokens_at_once):
            part = slice(first, first + self._tokens_at_once)
            yield part, x_ND[part], None if half is None else half.some(part)

    @property
    def _whole(self) -> Matrix | None:
        """The matrix that has all outputs, one beside the other."""
        return self.matrices[0] if len(self.matrices) == 1 else None

    def picked(self, outs_T: Tensor) -> "TritonLinear | None":
        """None where they lie in several matrices."""
        if len(self.matrices) > 1:
            return None
        linear, whole = copy(self), self.matrices[0]
        outs_T = outs_T.to(whole.codes.device)
        linear.matrices = [picked(whole, outs_T)]
        linear.bias = None if self.bias is None else self.bias[outs_T]
        linear.out_features = len(outs_T)
        return linear
