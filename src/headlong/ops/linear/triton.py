"""A linear layer y = x Wᵀ on a GPU, for few tokens at the speed of its memory: each weight is read once, as narrow as
it is stored.

Serves floats, FP8, NVFP4, and whole numbers with a scale by group. Several weights over one input, whose outputs may
be reordered, become one linear: those of one layout become one `GemmWeight`, in the order of their outputs. A token's
bits depend on its own row alone. N tokens, D inputs, O outputs, I gated outputs.
"""

from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

from headlong.ops.linear import prompt_gemm, triton_split_k
from headlong.ops.linear.linear import Argmax, Linear, SiluMul
from headlong.ops.linear.triton_block_m import REFERENCE_BLOCK_M, block_m_for
from headlong.ops.linear.triton_paired import Pair, paired_gemm
from headlong.ops.linear.triton_repack import layout_of, repack, select_outputs, shape_of
from headlong.ops.linear.triton_split_k import PartialSums
from headlong.ops.linear.triton_weight import FEW, GemmWeight
from headlong.ops.norm.normed import Norm, Normed, PartialNorm
from headlong.ops.norm.triton import empty_partial_norm, gemm_input
from headlong.quant.format import Weight

WORKSPACE = 1 << 26
"""The most numbers that partial sums may take; more tokens go in several launches."""


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
        self.weights = repack(weights, order, dtype)
        self.dtype = self.weights[0].dtype
        """The dtype that inputs are multiplied in."""
        self._pair = Pair.of(self.weights)

    @staticmethod
    def supports(weight: Weight) -> str | None:
        """Returns None if this weight can be served, else the reason why not."""
        if weight.device.type == "meta":
            return "the weight is not there"
        layout = layout_of(weight)
        return layout if isinstance(layout, str) else None

    def __call__(self, given: Normed, add_to: Tensor | None = None) -> Tensor:
        """Returns float32 [N, out]; plus `add_to`, of the same shape and dtype."""
        return self._gemm(given, add_to, None)[0]

    def add_to(self, given: Normed, residual_ND: Tensor, then: Norm) -> tuple[Tensor, Normed]:
        """Adds to the residual in the GEMM's own launch; part of what `then` makes of the sum may be left to the GEMM
        that takes it."""
        out_ND, normed = self._gemm(given, residual_ND, then)
        return out_ND, then(out_ND) if normed is None else normed

    def _gemm(
        self, given: Normed, add_to: Tensor | None, then: Norm | None
    ) -> tuple[Tensor, PartialNorm | None]:
        x_ND, _ = gemm_input(given)
        out_NO = x_ND.new_empty((len(x_ND), self.out_features), dtype=torch.float32)
        residual_NO = None if add_to is None else add_to.contiguous()
        then_partial = None
        if self._only is not None and self._only.is_split:
            then_partial = empty_partial_norm(then, out_NO)
        for part, x, partial_norm in self._launches(given):
            if self._pair is not None and add_to is None and len(x) <= FEW:
                paired_gemm(self._pair, x, self.bias, partial_norm, out_NO[part])
                continue
            residual = None if residual_NO is None else residual_NO[part]
            put = None if then_partial is None else then_partial.some(part)
            for weight in self.weights:
                given_out = (self.bias, residual, out_NO[part], partial_norm, then, put)
                if prompt_gemm.serves(weight, len(x)):
                    triton_split_k.epilogue(weight, prompt_gemm.sums(weight, x)[None], *given_out)
                else:
                    triton_split_k.gemm(weight, x, block_m_for(len(x), weight), *given_out)
        return out_NO, then_partial

    def gated(self, given: Normed, silu_mul: SiluMul, dtype: torch.dtype) -> Tensor:
        weight = self._only
        if weight is None:
            return silu_mul(self(given))
        x_ND, partial_norm = gemm_input(given)
        out_NI = x_ND.new_empty((len(x_ND), self.out_features // 2), dtype=dtype)
        if self.bias is None and prompt_gemm.serves(weight, len(x_ND), gated=dtype):
            fitting_ND = x_ND.to(self.dtype).contiguous()
            prompt_gemm.gated(weight, fitting_ND, out_NI, partial_norm)
            return out_NI
        for part, x, partial_norm in self._launches(given):
            block_m = block_m_for(len(x), weight)
            triton_split_k.gated_gemm(weight, x, block_m, self.bias, out_NI[part], partial_norm)
        return out_NI

    def argmax(self, x_ND: Tensor, argmax: Argmax) -> Tensor:
        weight = self._only
        if weight is None:
            return argmax(self(x_ND))
        found_N = x_ND.new_empty(len(x_ND), dtype=torch.long)
        for part, x, _ in self._launches(x_ND):
            triton_split_k.argmax_gemm(weight, x, block_m_for(len(x), weight), self.bias, found_N[part])
        return found_N

    def partial_sums(self, given: Normed, *, inputs_ready: bool = False) -> PartialSums:
        """Returns what `__call__` gives, for kernels that add its partial sums themselves. Where these would take too
        much memory, or there is more to it than a sum, they are added here. `inputs_ready` promises that the inputs
        were there before the kernel that was launched last began, and that it waited before it launched its
        dependents."""
        weight, (x_ND, partial_norm) = self._only, gemm_input(given)
        if weight is None or self.bias is not None or len(x_ND) > self._tokens_at_once(len(x_ND)):
            return PartialSums.whole(self(given))
        fitting_ND = x_ND.to(self.dtype).contiguous()
        inputs_ready = inputs_ready and fitting_ND is x_ND  # else it is only just being made
        if prompt_gemm.serves(weight, len(x_ND)):
            partials_PNO = prompt_gemm.sums(weight, fitting_ND)[None]
        else:
            block_m = block_m_for(len(x_ND), weight)
            partials_PNO = weight.partial_sums(fitting_ND, block_m, inputs_ready=inputs_ready)
        return PartialSums.of(weight, partials_PNO, partial_norm)

    def _launches(self, given: Normed) -> Iterator[tuple[slice, Tensor, PartialNorm | None]]:
        """Yields the tokens that go into one launch, what is multiplied of them, and the partial norm that belongs to
        it."""
        x_ND, partial_norm = gemm_input(given)
        x_ND = x_ND.to(self.dtype).contiguous()
        at_once = self._tokens_at_once(len(x_ND))
        for first in range(0, len(x_ND), at_once):
            part = slice(first, first + at_once)
            yield part, x_ND[part], None if partial_norm is None else partial_norm.some(part)

    def _tokens_at_once(self, num_tokens: int) -> int:
        """How many of so many tokens go into one launch, by the room that their partial sums take."""
        most = max(
            weight.num_outs * (1 if prompt_gemm.serves(weight, num_tokens) else weight.num_partials)
            for weight in self.weights
        )
        return min(max(WORKSPACE // most, REFERENCE_BLOCK_M), 1 << 15)

    @property
    def _only(self) -> GemmWeight | None:
        """The weight that has all outputs, in order; None where there are several."""
        return self.weights[0] if len(self.weights) == 1 else None

    def picked(self, outs_T: Tensor) -> "TritonLinear | None":
        """Returns a linear of these outputs; None where there are several `GemmWeight`s."""
        weight = self._only
        if weight is None:
            return None
        linear, outs_T = copy(self), outs_T.to(weight.codes.device)
        linear.weights = [select_outputs(weight, outs_T)]
        linear.bias = None if self.bias is None else self.bias[outs_T]
        linear.out_features = len(outs_T)
        return linear
