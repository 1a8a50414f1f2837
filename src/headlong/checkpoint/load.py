"""Weights as model code sees them: ask by canonical name and shape, receive a tensor or a packed matrix.

A model is built twice from the same code: once with `Expectations`, which only writes down what is asked for, and,
after `verify` has compared that list with the disk, once with a `WeightLoader`. Knows nothing of models; nothing is
cached, so the peak is the loaded weights and one small staging buffer.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from headlong.checkpoint.detect import Detector
from headlong.checkpoint.names import NameMap
from headlong.checkpoint.tensor_info import (
    STAGING_BYTES,
    TensorInfo,
    allocate,
    map_tensor,
    read_into,
    read_tensor,
)
from headlong.errors import CheckpointError
from headlong.quant import rtn
from headlong.quant.format import Format, PackedWeight, Shape, Weight
from headlong.quant.gguf import BLOCK_SIZES

Role = Literal["vector", "indices", "matrix", "experts"]
"""What a tensor is to a model."""
INTEGERS = ("I8", "I16", "I32", "I64")
Repack = Literal["none", "fp8", "int8", "int4"]


@dataclass(frozen=True)
class Need:
    """What a model asks for under one name. Vectors are floats, indices are whole numbers; matrices and experts may be
    packed."""

    role: Role
    shape: Shape

    @property
    def is_matrix(self) -> bool:
        return self.role in ("matrix", "experts")


class WeightSource(Protocol):
    """What a model may ask while it is built."""

    dtype: torch.dtype
    device: torch.device

    def has(self, name: str) -> bool:
        """True if the checkpoint holds the canonical `name`, packed or not."""
        ...

    def is_packed(self, name: str) -> bool:
        """True if the matrix `name` will be a `PackedWeight`."""
        ...

    def vector(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, which must have this shape; in `dtype`, or in the source's own."""
        ...

    def indices(self, name: str, *shape: int, below: int) -> Tensor:
        """The whole numbers `name`, which must have this shape and be from 0 to `below` − 1."""
        ...

    def matrix(self, name: str, out_features: int, in_features: int) -> Weight:
        """The matrix `name`, as it is stored where it is packed, else in the source's dtype."""
        ...

    def experts(self, name: str, count: int, out_features: int, in_features: int) -> list[Weight]:
        """The matrix of each expert, from a tensor that holds them all."""
        ...


class Expectations:
    """A dry run of loading. It records every request in `expected` and hands out meta tensors for matrices. Vectors are
    real tensors of ones, since models compute with them, and computing on meta tensors would make torch load its
    compiler, which takes a second and a hundred megabytes."""

    def __init__(self, names: Container[str], dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.device = torch.device("meta")
        self.expected: dict[str, Need] = {}
        self._names = names

    def has(self, name: str) -> bool:
        return name in self._names

    def is_packed(self, name: str) -> bool:  # noqa: ARG002 - shapes are the same either way
        return False

    def vector(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self._expect(name, Need("vector", shape))
        return torch.ones(shape, dtype=dtype or self.dtype)

    def indices(self, name: str, *shape: int, below: int) -> Tensor:  # noqa: ARG002 - known once they are read
        self._expect(name, Need("indices", shape))
        return torch.zeros(shape, dtype=torch.long)

    def matrix(self, name: str, out_features: int, in_features: int) -> Weight:
        return self._expect(name, Need("matrix", (out_features, in_features)))

    def experts(self, name: str, count: int, out_features: int, in_features: int) -> list[Weight]:
        return list(self._expect(name, Need("experts", (count, out_features, in_features))))

    def _expect(self, name: str, need: Need) -> Tensor:
        before = self.expected.setdefault(name, need)
        assert before == need, f"{name} is asked for as {before} and as {need}"
        return torch.empty(need.shape, dtype=self.dtype, device=self.device)


def _as_they_lie(name: str) -> Tensor | None:  # noqa: ARG001 - whatever the tensor
    return None


class WeightLoader:
    """Reads each tensor when it is asked for.

    `keep_stored` keeps floats that are narrower than `dtype` as they are on disk, to be widened when they are
    multiplied. `repack` packs every matrix into that format, "none" unpacks them. `mapped` leaves matrices that need
    no conversion in their file, for who lays them out anew anyway. `wanted` names what will be asked for, so that what
    is reported ends at `nbytes`; by default everything. `row_order` says of a name how the rows of its tensor are to be
    reordered; None where they lie as the model wants them.
    """

    def __init__(
        self,
        names: NameMap,
        detector: Detector,
        dtype: torch.dtype,
        device: torch.device | str,
        wanted: Iterable[str] | None = None,
        keep_stored: bool = False,
        repack: Repack | None = None,
        mapped: bool = False,
        row_order: Callable[[str], Tensor | None] = _as_they_lie,
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._names = names
        self._detector = detector
        self._keep_stored = keep_stored
        self._repack: Repack | None = repack
        self._mapped = mapped
        self._row_order = row_order
        self.report: Callable[[int], None] = _unheard
        """Called with the number of bytes read so far, out of `nbytes`."""
        # One buffer for all conversions: a fresh one per tensor, freed between results that stay, leaves
        # holes in the heap that add up to the size of the model.
        pinned = self.device.type == "cuda"
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._done = 0
        wanted = names.sources if wanted is None else set(wanted)
        self.nbytes = sum(info.nbytes for name in wanted for info in names.parts(name).values())

    def has(self, name: str) -> bool:
        return bool(self._names.parts(name))

    def is_packed(self, name: str) -> bool:
        if self._repack is not None:
            return self._repack != "none"
        infos = self._names.parts(name).values()
        return any(not info.is_float or self._stays(info) for info in infos)

    def vector(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        info = self._names.sources.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name!r} is missing")
        transform = self._names.transforms.get(name)
        found = info.shape if transform is None else transform.model_shape(info.shape)
        if found != shape or not info.is_float:
            raise _fault(name, info, f"expected floats {list(shape)}, found {info.dtype} {list(info.shape)}")
        target = dtype or self.dtype
        if transform is None:
            result = torch.empty(shape, dtype=target, device=self.device)
            read_into(info, result, self._staging)
        else:
            stored = torch.empty(info.shape, dtype=torch.float64)
            read_into(info, stored, self._staging)
            result = transform.to_model(stored).to(self.device, target)
        if (order := self._row_order(name)) is not None:
            result = result[order.to(self.device)]
        self._advance(info.nbytes)
        return result

    def indices(self, name: str, *shape: int, below: int) -> Tensor:
        info = self._names.sources.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name!r} is missing")
        if info.shape != shape or info.dtype not in INTEGERS:
            raise _fault(
                name, info, f"expected whole numbers {list(shape)}, found {info.dtype} {list(info.shape)}"
            )
        found = read_tensor(info, torch.device("cpu")).long()
        if bool((found < 0).any() | (found >= below).any()):
            raise _fault(name, info, f"holds numbers that are not from 0 to {below - 1}; the file is damaged")
        self._advance(info.nbytes)
        return found.to(self.device)

    def matrix(self, name: str, out_features: int, in_features: int) -> Weight:
        shape = (out_features, in_features)
        infos = self._parts(name)
        if name in self._names.transforms:
            weight: Weight = self.vector(name, *shape)
        elif self._reads_plainly(infos):
            weight = self._read_plain(name, infos["weight"], shape)
        else:
            format = self._detector.format(name, shape)
            weight = self._packed(name, self._read_parts(infos), format, shape)
        order = self._row_order(name)
        if order is not None:
            order = order.to(self.device)
            weight = weight[order] if isinstance(weight, Tensor) else weight.permuted(order)
        return self._repacked(weight)

    def experts(self, name: str, count: int, out_features: int, in_features: int) -> list[Weight]:
        shape = (out_features, in_features)
        infos = self._parts(name)
        if self._reads_plainly(infos):
            stored = self._names.transform_of(infos["weight"])
            whole = self._read_plain(name, infos["weight"], stored.disk_shape((count, *shape)))
            weights: list[Weight] = list(stored.to_model(whole))
        else:
            format = self._detector.format(name, (count, *shape))
            parts = {
                part: self._names.transform_of(infos[part]).to_model(tensor)
                for part, tensor in self._read_parts(infos).items()
            }
            weights = [
                self._packed(name, {part: tensor[i] for part, tensor in parts.items()}, format, shape)
                for i in range(count)
            ]
        return [self._repacked(weight) for weight in weights]

    def _parts(self, name: str) -> dict[str, TensorInfo]:
        infos = self._names.parts(name)
        if not infos:
            raise CheckpointError(f"tensor {name!r} is missing")
        return infos

    def _reads_plainly(self, infos: dict[str, TensorInfo]) -> bool:
        """True if the matrix is stored as floats that are wanted in the loader's own dtype."""
        return list(infos) == ["weight"] and infos["weight"].is_float and not self._stays(infos["weight"])

    def _stays(self, info: TensorInfo) -> bool:
        return self._keep_stored and info.is_float and info.stored_dtype.itemsize < self.dtype.itemsize

    def _read_plain(self, name: str, info: TensorInfo, shape: Shape) -> Tensor:
        if info.shape != shape:
            raise _fault(name, info, f"expected {list(shape)}, found {list(info.shape)}")
        if self._maps(info) and info.stored_dtype == self.dtype:
            result = map_tensor(info)
        else:
            result = allocate(shape, self.dtype, self.device)
            read_into(info, result, self._staging)
        self._advance(info.nbytes)
        return result

    def _read_parts(self, infos: dict[str, TensorInfo]) -> dict[str, Tensor]:
        parts = {}
        for part, info in infos.items():
            # What goes with codes may be kept by who multiplies them.
            mapped = self._maps(info) and (len(infos) == 1 or not info.is_float)
            parts[part] = map_tensor(info) if mapped else read_tensor(info, self.device)
            self._advance(info.nbytes)
        return parts

    def _maps(self, info: TensorInfo) -> bool:
        """True if the tensor may stay mapped to its file: GGUF blocks, and float matrices that native GEMMs copy into
        their own layout. Those with an odd number of columns are multiplied as they are, and so must be read."""
        if not self._mapped or info.dtype in BLOCK_SIZES:
            return self._mapped
        aligned = info.nbytes > 0 and info.start % info.stored_dtype.itemsize == 0
        is_even = len(info.shape) > 1 and info.shape[-1] % 2 == 0
        return aligned and is_even and info.dtype in ("F32", "F16", "BF16")

    def _packed(self, name: str, parts: dict[str, Tensor], format: Format, shape: Shape) -> PackedWeight:
        try:
            return format.pack(parts, shape)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name!r} ({format.label}): {error}") from error

    def _repacked(self, weight: Weight) -> Weight:
        if self._repack is None:
            return weight
        whole = weight if isinstance(weight, Tensor) else weight.dequantize(0, weight.out_features)
        if self._repack == "none":
            return whole.to(self.dtype)
        format, parts = rtn.quantize(whole.float(), self._repack)
        return format.pack(parts, (whole.shape[0], whole.shape[1]))

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        # A tensor read twice (a tied embedding) must not run past the end.
        self.report(min(self._done, self.nbytes))


def _unheard(done: int) -> None:
    """Reports nothing."""


def _fault(name: str, info: TensorInfo, what: str) -> CheckpointError:
    return CheckpointError(f"{info.file}: tensor {name!r} (on disk {info.name}): {what}")
