"""How values that a file stores in its own way become those of a usual safetensors checkpoint, and back.

A `Transform` needs the tensor alone. The row orders of GGUF need sizes too and are given as index tensors. Knows
neither names nor files: `gguf_names` and `names` say which tensor takes which.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Transform(ABC):
    """A change of a tensor's values between disk and model. Both directions keep the order of rows and columns. float64
    stays; anything narrower may become float32."""

    @abstractmethod
    def to_model(self, stored: Tensor) -> Tensor:
        """The values as in a usual safetensors checkpoint."""

    @abstractmethod
    def to_disk(self, weight: Tensor) -> Tensor:
        """The values the file stores."""

    def model_shape(self, stored: Shape) -> Shape:
        """The shape in the model of a tensor that is stored with the shape `stored`."""
        return stored

    def disk_shape(self, shape: Shape) -> Shape:
        """The shape in the file of a tensor that has this `shape` in the model."""
        return shape


class _Identity(Transform):
    def to_model(self, stored: Tensor) -> Tensor:
        return stored

    def to_disk(self, weight: Tensor) -> Tensor:
        return weight


class _OneAdded(Transform):
    """A zero-centred norm, stored as the factor it multiplies with.

    In float32 the sum keeps all of a bfloat16 weight down to 2**-16; smaller ones come back rounded.
    """

    def to_model(self, stored: Tensor) -> Tensor:
        return _wide(stored) - 1.0

    def to_disk(self, weight: Tensor) -> Tensor:
        return _wide(weight) + 1.0


class _LogDecay(Transform):
    """`A_log`, which is stored as the rate -exp(A_log)."""

    def to_model(self, stored: Tensor) -> Tensor:
        return (-stored.double()).log().to(_wide(stored).dtype)

    def to_disk(self, weight: Tensor) -> Tensor:
        return -weight.double().exp().to(_wide(weight).dtype)


class _Squeezed(Transform):
    """A tensor with a dimension of size 1 that is not stored. A file that stores it all the same is read as well."""

    def __init__(self, dim: int, rank: int) -> None:
        self.dim = dim
        self.rank = rank

    def to_model(self, stored: Tensor) -> Tensor:
        return stored.reshape(self.model_shape(tuple(stored.shape)))

    def to_disk(self, weight: Tensor) -> Tensor:
        return weight.squeeze(self.dim)

    def model_shape(self, stored: Shape) -> Shape:
        return stored if len(stored) == self.rank else (*stored[: self.dim], 1, *stored[self.dim :])

    def disk_shape(self, shape: Shape) -> Shape:
        return shape[: self.dim] + shape[self.dim + 1 :]


class _TapsInTheMiddle(Transform):
    """A convolution's weights as MLX keeps them: [C, K, 1] for [C, 1, K]."""

    def to_model(self, stored: Tensor) -> Tensor:
        return stored.transpose(-1, -2).contiguous()

    def to_disk(self, weight: Tensor) -> Tensor:
        return weight.transpose(-1, -2).contiguous()

    def model_shape(self, stored: Shape) -> Shape:
        return (*stored[:-2], *reversed(stored[-2:]))

    def disk_shape(self, shape: Shape) -> Shape:
        return self.model_shape(shape)


class _Interleaved(Transform):
    """Gates and ups of experts [experts, both, …], which take turns where the model has all gates first."""

    def to_model(self, stored: Tensor) -> Tensor:
        return stored.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)

    def to_disk(self, weight: Tensor) -> Tensor:
        return weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class _Transposed(Transform):
    """Experts' matrices as [experts, in, out], which the model has as [experts, out, in]; the outputs of gates and ups
    in one tensor are `interleaved`."""

    def __init__(self, *, interleaved: bool) -> None:
        self.outputs = INTERLEAVED if interleaved else IDENTITY

    def to_model(self, stored: Tensor) -> Tensor:
        return self.outputs.to_model(stored.transpose(1, 2)).contiguous()

    def to_disk(self, weight: Tensor) -> Tensor:
        return self.outputs.to_disk(weight).transpose(1, 2).contiguous()

    def model_shape(self, stored: Shape) -> Shape:
        return (stored[0], *reversed(stored[1:]))

    def disk_shape(self, shape: Shape) -> Shape:
        return self.model_shape(shape)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


IDENTITY: Transform = _Identity()
NORM: Transform = _OneAdded()
LOG_DECAY: Transform = _LogDecay()
CONV: Transform = _Squeezed(dim=1, rank=3)
"""[C, K] on disk, [C, 1, K] in the model."""
SHARED_GATE: Transform = _Squeezed(dim=0, rank=2)
"""[H] on disk, [1, H] in the model."""
MLX_CONV: Transform = _TapsInTheMiddle()
INTERLEAVED: Transform = _Interleaved()
TRANSPOSED: Transform = _Transposed(interleaved=False)
TRANSPOSED_INTERLEAVED: Transform = _Transposed(interleaved=True)


def rope_row_order(num_heads: int, head_dim: int) -> Tensor:
    """Index such that `model_rows = stored_rows[order]`, for q and k of an architecture that stores rotary pairs.

    On disk the two numbers of a rotary pair are neighbours; in the model they lie half a head apart.
    """
    pairs = torch.arange(num_heads * head_dim).view(num_heads, head_dim // 2, 2)
    return pairs.transpose(1, 2).reshape(-1)


def tiled_row_order(num_key_heads: int, num_value_heads: int, value_dim: int) -> Tensor:
    """Index such that `model_rows = stored_rows[order]`, for the value heads of a DeltaNet.

    On disk value head r * K + k belongs to key head k (tiled); in the model it is value head k * R + r (grouped),
    where K is the number of key heads and R that of value heads to each.
    """
    repeats = num_value_heads // num_key_heads
    tiled = torch.arange(num_value_heads * value_dim).view(repeats, num_key_heads, value_dim)
    return tiled.transpose(0, 1).reshape(-1)


def inverse(order: Tensor) -> Tensor:
    """Index such that `stored_rows = model_rows[inverse(order)]`."""
    return torch.argsort(order)


@dataclass(frozen=True)
class Order:
    """Indices to be taken of a tensor's rows and of its columns; None leaves them alone."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def inverse(self) -> "Order":
        return Order(*(None if part is None else inverse(part) for part in (self.rows, self.columns)))


AS_IS = Order()
