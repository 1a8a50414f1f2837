"""The latent attention core as one native call per layer; float32 arithmetic whatever the cache is."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headlong.ops import native
from headlong.ops.latent_attention.weights import LatentAttentionWeights
from headlong.ops.linear.native import MatrixStruct, NativeLinear
from headlong.ops.linear.native_source import Source
from headlong.ops.native_step import NativeStep
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles
from headlong.quant.format import Weight


class LatentAttentionStruct(ctypes.Structure):
    """Mirrors `LatentAttention` in csrc/cores.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "plain_dim", "rope_dim", "rank", "value_dim")),
        *((name, ctypes.c_int64) for name in ("interleaved", "page_size", "padded_width")),
        ("norm", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "latents")),
        ("is_float", ctypes.c_int),
    )


class NativeLatentAttention:
    """The core of one layer; its cache is bound at the first call."""

    name = "native"

    def __init__(
        self, weights: LatentAttentionWeights, keys: Sequence[NativeLinear], values: Sequence[NativeLinear]
    ) -> None:
        """`keys` and `values` are the heads' own matrices, laid out."""
        w = self.sizes = weights.sizes
        self.norm = weights.norm
        self.out_features = w.num_heads * w.value_dim
        self._kept = (keys, values)
        self._keys, self._values = _structs(keys), _structs(values)
        self._bound: tuple[Tensor, LatentAttentionStruct] | None = None

    @classmethod
    def load(
        cls, weights: LatentAttentionWeights, source: Callable[[Weight], Source | None]
    ) -> "NativeLatentAttention":
        """Lays out the heads' own matrices, which are plain; `source` says how the native GEMM takes a matrix. All that
        it does not take as it is, it takes as float32."""

        def laid_out(matrices: Tensor) -> list[NativeLinear]:
            sources = [
                source(matrix.contiguous()) or source(matrix.float().contiguous()) for matrix in matrices
            ]
            return [NativeLinear([found]) for found in sources if found is not None]

        return cls(weights, laid_out(weights.keys_HRP), laid_out(weights.values_HVR))

    def __call__(
        self, queries: Tensor, given: Tensor, latents: Tensor, angles: Angles, step: PreparedStep
    ) -> Tensor:
        out = queries.new_empty(queries.shape[0], self.out_features)
        self._run(native.address(queries), given, latents, angles, step, out.data_ptr())
        return out

    def write(self, given: Tensor, latents: Tensor, angles: Angles, step: PreparedStep) -> None:
        """Writes the tokens' latents, and computes nothing else."""
        self._run(None, given, latents, angles, step, None)

    def _run(
        self,
        queries: int | None,
        given: Tensor,
        latents: Tensor,
        angles: Angles,
        step: PreparedStep,
        out: int | None,
    ) -> None:
        assert isinstance(step, NativeStep)
        if self._bound is None or self._bound[0] is not latents:
            self._bound = (latents, self.bind(latents))
        struct, place = self._bound[1], native.address(given)
        native.kernel("headlong_latent_attention")(
            ctypes.addressof(struct), queries, place, out, step.address(angles)
        )

    def bind(self, latents: Tensor) -> LatentAttentionStruct:
        """Binds weights and cache as the kernel takes them; they must outlive it."""
        w = self.sizes
        assert latents.dtype in (torch.float32, torch.bfloat16) and latents.is_contiguous()
        return LatentAttentionStruct(
            w.num_heads,
            w.plain_dim,
            w.rope_dim,
            w.rank,
            w.value_dim,
            w.interleaved,
            *latents.shape[1:],
            native.address(self.norm.weight),
            float(self.norm.eps),
            w.scale,
            ctypes.addressof(self._keys),
            ctypes.addressof(self._values),
            latents.data_ptr(),
            latents.dtype == torch.float32,
        )


def _structs(linears: Sequence[NativeLinear]) -> "ctypes.Array[MatrixStruct]":
    """The matrices side by side, as the kernel reads them: one run of panels each."""
    panels = [linear.panels for linear in linears]
    assert all(len(own) == 1 for own in panels)
    return (MatrixStruct * len(panels))(*(own[0].struct for own in panels))
