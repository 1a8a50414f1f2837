"""Modules as rows of a table, layers and experts that are alike in one row. Reads names and headers only."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from headlong.checkpoint.detect import HEAD
from headlong.checkpoint.names import NameMap
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.engine.build import Blueprint
from headlong.ops.backend import Backend
from headlong.quant.format import Format
from headlong.quant.plain import PlainFormat

_IN_LAYER = re.compile(r"(?P<stack>(?:.*\.)?layers)\.(?P<index>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<index>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True)
class Module:
    """One matrix or vector by its canonical name, or `count` alike; `shape` is that of one, the totals are of all.
    `kernel` is who multiplies it, None for what is not multiplied; `reason` says how the format was told."""

    name: str
    group: str
    """Modules with the same group stand together."""
    format: str
    bits: float
    shape: tuple[int, ...]
    count: int
    nbytes: int
    parameters: int
    kernel: str | None = None
    device: str | None = None
    reason: str = ""

    @property
    def in_head(self) -> bool:
        return self.name.startswith(HEAD)


def list_modules(
    names: NameMap, blueprint: Blueprint | None, ops: Backend | None, *, every: bool
) -> list[Module]:
    """What may be loaded, the target's before the head's; `every` keeps layers and experts apart. Without a blueprint
    (the model does not fit) every tensor is a row of its own."""
    singles = sorted(_singles(names, blueprint, ops), key=lambda module: _order(module.name))
    return singles if every else _grouped(_experts_joined(singles))


def _singles(names: NameMap, blueprint: Blueprint | None, ops: Backend | None) -> Iterator[Module]:
    described: set[str] = set()
    if blueprint is not None and ops is not None:
        for name, format in blueprint.formats.items():
            infos = names.parts(name)
            described |= {info.name for info in infos.values()}
            yield _matrix(name, infos, format, blueprint, ops)
    for name, info in names.sources.items():
        if info.name not in described:
            yield Module(
                name=name,
                group=_group(name),
                format=info.dtype,
                bits=8 * info.nbytes / max(math.prod(info.shape), 1),
                shape=info.shape,
                count=1,
                nbytes=info.nbytes,
                parameters=math.prod(info.shape),
                device=None if ops is None else str(ops.device),
            )


def _matrix(
    name: str, infos: dict[str, TensorInfo], format: Format, blueprint: Blueprint, ops: Backend
) -> Module:
    shape = blueprint.expected[name].shape if name in blueprint.expected else infos["weight"].shape
    parameters, nbytes = math.prod(shape), sum(info.nbytes for info in infos.values())
    found = ", ".join(f"{part} {info.dtype}" for part, info in infos.items())
    said = blueprint.detector.disagreements.get(name.removesuffix(".weight"))
    quantised = blueprint.detector.activations.get(name.removesuffix(".weight"))
    inputs = [f"the config quantises activations, too ({quantised}), which Headlong keeps in float"]
    unused = [f"{part}: {why}" for part, why in format.unused.items() if part in infos]
    is_packed = not isinstance(format, PlainFormat)
    dtype, repacked = ops.dtype, None
    if name.startswith(HEAD):
        dtype, repacked = blueprint.head_dtype(ops.device), blueprint.repacked_head
        is_packed = is_packed if repacked is None else repacked != "none"
    kernel, why = ops.explain_linear(dtype, format if is_packed else None)
    kernel = "lookup" if name.startswith("embed_tokens") else kernel
    return Module(
        name=name,
        group=_group(name),
        format=infos["weight"].dtype if isinstance(format, PlainFormat) else format.label,
        bits=8 * nbytes / max(parameters, 1),
        shape=shape,
        count=1,
        nbytes=nbytes,
        parameters=parameters,
        kernel=kernel,
        device=str(ops.device),
        reason="; ".join(
            part
            for part in (
                found,
                said,
                *unused,
                *(inputs if quantised and not unused else ()),
                _on_load(repacked),
                why,
            )
            if part
        ),
    )


def _on_load(repacked: str | None) -> str | None:
    return repacked and ("unpacked on load" if repacked == "none" else f"packed on load as {repacked}")


def _group(name: str) -> str:
    return HEAD if name.startswith(HEAD) else ""


def _order(name: str) -> tuple[bool, bool, int]:
    """Target before head, then what is in no layer, then layers by number; the sort keeps the file's order."""
    match = _IN_LAYER.fullmatch(name)
    return name.startswith(HEAD), match is not None, int(match["index"]) if match else 0


def _experts_joined(singles: list[Module]) -> list[Module]:
    """Experts of one layer that are stored one by one and are alike become one row each of gate, up and down."""
    alike: dict[object, list[Module]] = {}
    for module in singles:
        match = _EXPERT.fullmatch(module.name)
        key = (match["stack"], match["rest"], module.format, module.shape) if match else module.name
        alike.setdefault(key, []).append(module)
    return [
        modules[0] if len(modules) == 1 else _joined(modules, _range_name(_EXPERT, modules))
        for modules in alike.values()
    ]


def _range_name(pattern: re.Pattern[str], modules: list[Module]) -> str:
    matches = [match for module in modules if (match := pattern.fullmatch(module.name))]
    return f"{matches[0]['stack']}.{ranges(int(match['index']) for match in matches)}.{matches[0]['rest']}"


def _joined(modules: list[Module], name: str) -> Module:
    return replace(
        modules[0],
        name=name,
        count=sum(module.count for module in modules),
        nbytes=sum(module.nbytes for module in modules),
        parameters=sum(module.parameters for module in modules),
    )


def _grouped(singles: list[Module]) -> list[Module]:
    """Layers of one stack are alike when all their modules have the same names, formats, shapes and reasons."""
    layers: dict[tuple[str, int], dict[str, Module]] = {}
    rows: list[Module] = []
    for module in singles:
        match = _IN_LAYER.fullmatch(module.name)
        if match is None:
            rows.append(module)
        else:
            layers.setdefault((match["stack"], int(match["index"])), {})[match["rest"]] = module
    kinds: dict[object, list[tuple[str, int]]] = {}
    for key, modules in layers.items():
        signature = frozenset((rest, m.format, m.shape) for rest, m in modules.items())
        kinds.setdefault((key[0], signature), []).append(key)
    for keys in kinds.values():
        stack = f"{keys[0][0]}.{ranges(index for _, index in keys)}"
        for rest in layers[keys[0]]:
            joined = _joined([layers[key][rest] for key in keys], f"{stack}.{rest}")
            rows.append(replace(joined, group=HEAD if joined.in_head else stack))
    return sorted(rows, key=lambda module: module.in_head)


def ranges(numbers: Iterable[int]) -> str:
    """Writes numbers as ranges: 0, 1, 2, 4 as `0-2,4`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
