"""Tensors as rows of a table, layers that are alike in one row. Reads names and headers only."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.names import NameMap
from headlong.engine.build import HEAD

_IN_LAYER = re.compile(r"(?P<stack>(?:.*\.)?layers)\.(?P<index>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True)
class Module:
    """One tensor by its canonical name, or `count` alike; `shape` is that of one, the totals are of all."""

    name: str
    group: str
    """Modules with the same group stand together."""
    format: str
    shape: tuple[int, ...]
    count: int
    nbytes: int
    parameters: int

    @property
    def in_head(self) -> bool:
        return self.name.startswith(HEAD)


def list_modules(checkpoint: Checkpoint, names: NameMap, *, every: bool) -> list[Module]:
    """The tensors that may be loaded, the target's before the head's; `every` keeps layers apart."""
    singles = sorted(_singles(checkpoint, names), key=lambda module: _order(module.name))
    return singles if every else _grouped(singles)


def _singles(checkpoint: Checkpoint, names: NameMap) -> Iterator[Module]:
    for name, disk_names in names.sources.items():
        infos = [checkpoint.tensors[disk] for disk in disk_names]
        fused = names.fused.get(name)
        yield Module(
            name=name,
            group=HEAD if name.startswith(HEAD) else "",
            format="+".join(sorted({info.dtype for info in infos})),
            shape=(fused.shape or ()) if fused is not None else infos[0].shape,
            count=1,
            nbytes=sum(info.nbytes for info in infos),
            parameters=sum(math.prod(info.shape) for info in infos),
        )


def _order(name: str) -> tuple[bool, bool, int]:
    """Target before head, then what is in no layer, then layers by number; the sort keeps the file's order."""
    match = _IN_LAYER.fullmatch(name)
    return name.startswith(HEAD), match is not None, int(match["index"]) if match else 0


def _grouped(singles: list[Module]) -> list[Module]:
    """Layers of one stack are alike when all their tensors have the same names, formats and shapes."""
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
        for rest, first in layers[keys[0]].items():
            alike = [layers[key][rest] for key in keys]
            rows.append(
                replace(
                    first,
                    name=f"{stack}.{rest}",
                    group=HEAD if first.in_head else stack,
                    count=len(alike),
                    nbytes=sum(module.nbytes for module in alike),
                    parameters=sum(module.parameters for module in alike),
                )
            )
    return sorted(rows, key=lambda module: module.in_head)


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 4 as `0-2,4`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
