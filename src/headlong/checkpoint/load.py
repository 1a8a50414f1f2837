"""Weights as model code sees them: ask by canonical name and shape, receive a tensor.

A model is built twice from the same code: once with `Expectations`, which only writes down what is asked
for, and, after `verify` has compared that list with the disk, once with a `WeightLoader`. Knows nothing of
models; nothing is cached, so the peak is the loaded weights and one small staging buffer.
"""

from collections.abc import Container, Iterable
from typing import Protocol

import torch

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.names import Fused, NameMap
from headlong.checkpoint.safetensors import STAGING_BYTES, TensorInfo, read_into
from headlong.checkpoint.verify import FLOAT_DTYPES, Shape, packed_as, verify
from headlong.errors import CheckpointError
from headlong.progress import ProgressFn, silent

__all__ = ["Expectations", "WeightLoader", "WeightSource", "verify"]


class WeightSource(Protocol):
    """What a model may ask while it is built."""

    dtype: torch.dtype
    device: torch.device

    def has(self, name: str) -> bool:
        """True if the checkpoint holds the canonical `name`."""
        ...

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor `name`, which must have this shape; in `dtype`, or in the source's own."""
        ...


class Expectations:
    """A dry run: records every request in `expected` and hands out meta tensors."""

    def __init__(self, names: Container[str], dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.device = torch.device("meta")
        self.expected: dict[str, Shape] = {}
        self._names = names

    def has(self, name: str) -> bool:
        return name in self._names

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        before = self.expected.setdefault(name, shape)
        assert before == shape, f"{name} is asked for as {list(before)} and as {list(shape)}"
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


class WeightLoader:
    """Reads each tensor when it is asked for.

    `wanted` names the tensors that will be asked for, so that progress ends at 100%; by default all of them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: NameMap,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: ProgressFn = silent,
        label: str = "load weights",
        wanted: Iterable[str] | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._checkpoint = checkpoint
        self._names = names
        self._progress = progress
        self._label = label
        # One buffer for all conversions: a fresh one per tensor, freed between results that stay, leaves
        # holes in the heap that add up to the size of the model.
        pinned = self.device.type == "cuda"
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._done = 0
        wanted = names.sources if wanted is None else set(wanted)
        disk_names = [disk for name in wanted for disk in names.sources.get(name, ())]
        self._total = sum(checkpoint.tensors[disk].nbytes for disk in disk_names)

    def has(self, name: str) -> bool:
        return name in self._names

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        target = dtype or self.dtype
        if name not in self._names:
            raise CheckpointError(f"{self._checkpoint.folder}: tensor {name!r} is missing")
        if (fused := self._names.fused.get(name)) is not None:
            return self._read_fused(fused, shape, target)
        info = self._checkpoint.tensors[self._names.sources[name][0]]
        self._check(name, info, shape, target)
        result = torch.empty(shape, dtype=target, device=self.device)
        read_into(info, result, self._staging)
        self._advance(info.nbytes)
        return result

    def _read_fused(self, fused: Fused, shape: Shape, target: torch.dtype) -> torch.Tensor:
        """Reads part after part into its place in the result."""
        part_shape = fused.part_shape(shape)
        if part_shape is None or fused.num_experts != shape[0] or fused.missing(shape[0]):
            found = list(fused.shape) if fused.shape else f"{len(fused.parts)} parts"
            raise self._fault(fused.name, f"expected {list(shape)}, found {found}")
        # All parts are checked before the first is read: the result may be most of the memory there is.
        for (expert, projection), info in fused.parts.items():
            self._check(fused.part_name(expert, projection), info, part_shape, target)
        result = torch.empty(shape, dtype=target, device=self.device)
        rows = part_shape[0]
        for (expert, projection), info in fused.parts.items():
            first = fused.projections.index(projection) * rows
            read_into(info, result[expert, first : first + rows], self._staging)
            self._advance(info.nbytes)
        return result

    def _check(self, name: str, info: TensorInfo, shape: Shape, target: torch.dtype) -> None:
        if info.shape != shape:
            raise self._fault(name, f"expected {list(shape)}, found {list(info.shape)} on disk ({info.name})")
        if target.is_floating_point and info.dtype not in FLOAT_DTYPES:
            raise self._fault(name, packed_as(info))

    def _fault(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint.folder}: tensor {name!r}: {what}")

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        # A tensor read twice (a tied embedding) must not run past the end.
        self._progress(self._label, min(self._done, self._total), self._total)
