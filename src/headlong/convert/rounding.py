"""The entries of a quantised folder: each matrix rounded to nearest when its turn comes, the rest as it is.

One matrix is in memory at a time, or the experts of one tensor. Knows names on disk; what becomes what is decided in
`quant_recipe`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from headlong.checkpoint.detect import HEAD
from headlong.checkpoint.load import Need, WeightLoader
from headlong.checkpoint.tensor_info import TORCH_DTYPES, TensorInfo
from headlong.checkpoint.writing import Entry
from headlong.convert.head_entries import verbatim
from headlong.convert.quant_recipe import Described, Recipe, Scheme
from headlong.engine.build import Blueprint
from headlong.errors import CheckpointError
from headlong.quant import rtn
from headlong.quant.compressed import CompressedInts
from headlong.quant.format import Format
from headlong.quant.plain import PlainFormat

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Rounding:
    """The entries of a quantised folder, and what its config must say of them."""

    def __init__(self, blueprint: Blueprint, recipe: Recipe) -> None:
        self.blueprint = blueprint
        self.recipe = recipe
        self.described = Described()
        self._loaders: dict[torch.dtype, WeightLoader] = {}

    def entries(self) -> list[Entry]:
        blueprint, names = self.blueprint, self.blueprint.names
        found, done = [], set()
        for name, need in blueprint.expected.items():
            parts = names.parts(name) if need.is_matrix else {"weight": names.sources[name]}
            done |= {info.name for info in parts.values()}
            found += self._tensor(name, need, parts)
        rest = [info for info in blueprint.checkpoint.tensors.values() if info.name not in done]
        return found + [verbatim(info) for info in rest]

    def _tensor(self, name: str, need: Need, parts: dict[str, TensorInfo]) -> Iterator[Entry]:
        rtn_format = self.recipe.format(name, need)
        stem = _stem(parts)
        if rtn_format is not None:
            rounded = self._experts if need.role == "experts" else self._matrix
            yield from rounded(name, need, stem, rtn_format)
            return
        if need.is_matrix and "embed_tokens" not in name:
            self._stays(name, stem)
        info = parts.get("weight")
        transform, usual = (
            self.blueprint.names.transforms.get(name),
            self.blueprint.family.naming.stored(name),
        )
        restored = transform is not None and transform is not usual
        is_float = bool(info and info.is_float) or need.role == "indices"
        if restored or (in_target(name) and not is_float):
            yield self._unpacked(name, need, stem)
        else:
            yield from (verbatim(part) for part in parts.values())

    def _stays(self, name: str, stem: str) -> None:
        if in_target(name):
            if not name.startswith("lm_head."):
                self.described.plain.append(stem)
        elif isinstance(self.blueprint.formats[name], PlainFormat):
            before, experts, _ = stem.partition(".experts.")
            module = before + experts.rstrip(".") if experts else stem
            if module not in self.described.plain_head:
                self.described.plain_head.append(module)

    def _unpacked(self, name: str, need: Need, stem: str) -> Entry:
        """The entry of a tensor that was stored in another format and is not packed again."""
        dtype = self._dtype(name)
        disk_name = f"{stem}.weight" if name.endswith(".weight") else stem
        if need.role == "vector":
            return Entry(
                disk_name, _NAMES[dtype], need.shape, lambda: self._loader(dtype).vector(name, *need.shape)
            )
        return Entry(disk_name, _NAMES[dtype], need.shape, lambda: iter(self._read(name, need, dtype)))

    def _matrix(self, name: str, need: Need, stem: str, rtn_format: rtn.RtnFormat) -> Iterator[Entry]:
        dtype = self._dtype(name)
        yield from self._parts(
            name, stem, need.shape, rtn_format, dtype, lambda: self._read(name, need, dtype)[0]
        )

    def _experts(self, name: str, need: Need, stem: str, rtn_format: rtn.RtnFormat) -> Iterator[Entry]:
        """The entries of all experts of one tensor, each by itself; where gate and up are one matrix, those are taken
        apart."""
        count, rows, columns = need.shape
        before, _, projection = stem.replace(".switch_mlp.", ".experts.").rpartition(".")
        fused = projection == "gate_up_proj"
        projections = ("gate_proj", "up_proj") if fused else (projection,)
        dtype = self._dtype(name)
        # Entries are written in this order, so one pass over the experts gives them all.
        stream = self._stream(name, need, dtype, len(projections))
        for expert in range(count):
            for own in projections:
                module = f"{before}.{expert}.{own}"
                shape = (rows // len(projections), columns)
                yield from self._parts(name, module, shape, rtn_format, dtype, lambda: next(stream))

    def _stream(self, name: str, need: Need, dtype: torch.dtype, pieces: int) -> Iterator[Tensor]:
        for matrix in self._read(name, need, dtype):
            yield from matrix.chunk(pieces)

    def _parts(
        self,
        name: str,
        module: str,
        shape: tuple[int, ...],
        rtn_format: rtn.RtnFormat,
        dtype: torch.dtype,
        read: Callable[[], Tensor],
    ) -> Iterator[Entry]:
        format, outline = _rounded(
            torch.empty(shape, dtype=dtype, device="meta"), rtn_format, self.recipe.group
        )
        listed = self.described.packed if in_target(name) else self.described.head
        listed.setdefault(Scheme.of(format), []).append(module)
        parts = _Parts(name, read, rtn_format, self.recipe.group)
        for part, tensor in outline.items():
            yield Entry(f"{module}.{part}", _NAMES[tensor.dtype], tuple(tensor.shape), parts.getter(part))

    def _read(self, name: str, need: Need, dtype: torch.dtype) -> list[Tensor]:
        """Reads the matrix, or the matrices of all experts, unpacked."""
        loader = self._loader(dtype)
        read = loader.experts if need.role == "experts" else lambda *a: [loader.matrix(*a)]
        weights = read(name, *need.shape)
        assert all(isinstance(weight, Tensor) for weight in weights)
        return weights  # type: ignore[return-value]

    def _dtype(self, name: str) -> torch.dtype:
        """The dtype of a weight before it is rounded, which is also that of its scales."""
        info = self.blueprint.names.sources.get(name)
        return info.stored_dtype if info is not None and info.is_float else torch.bfloat16

    def _loader(self, dtype: torch.dtype) -> WeightLoader:
        if dtype not in self._loaders:
            names, detector = self.blueprint.names, self.blueprint.detector
            self._loaders[dtype] = WeightLoader(names, detector, dtype, "cpu", wanted=(), repack="none")
        return self._loaders[dtype]


class _Parts:
    """The parts of one matrix, which is rounded when the first of them is asked for and forgotten with the last."""

    def __init__(self, name: str, read: Callable[[], Tensor], rtn_format: rtn.RtnFormat, group: int) -> None:
        self._name, self._read = name, read
        self._rtn_format: rtn.RtnFormat = rtn_format
        self._group = group
        self._left: dict[str, Tensor] = {}

    def getter(self, part: str) -> Callable[[], Tensor]:
        return lambda: self._take(part)

    def _take(self, part: str) -> Tensor:
        if not self._left:
            weight = self._read()
            if not bool(weight.isfinite().all()):
                raise CheckpointError(
                    f"tensor {self._name!r}: holds values that are not finite; the file is damaged"
                )
            self._left = _rounded(weight, self._rtn_format, self._group)[1]
        return self._left.pop(part)


def in_target(name: str) -> bool:
    return not name.startswith(HEAD)


def _rounded(weight_OD: Tensor, rtn_format: rtn.RtnFormat, group: int) -> tuple[Format, rtn.Parts]:
    """The format and the parts as they are written: INT8 codes lie four to a word, which is the form that engines read
    for weights whose activations are not quantised."""
    format, parts = rtn.quantize(weight_OD, rtn_format, group)
    if isinstance(format, CompressedInts) and not format.packed:
        codes_OD = parts.pop("weight").view(torch.uint8) ^ 128  # from -128 and up to 0 and up
        words = pad(codes_OD, (0, -codes_OD.shape[1] % 4)).view(torch.int32)
        parts = {"weight_packed": words, **parts, "weight_shape": torch.tensor(weight_OD.shape)}
        format = replace(format, packed=True)
    return format, parts


def _stem(parts: dict[str, TensorInfo]) -> str:
    """The name of the module on disk."""
    part, info = next(iter(parts.items()))
    return info.name.removesuffix(f".{part}").removesuffix(f"_{part}")
