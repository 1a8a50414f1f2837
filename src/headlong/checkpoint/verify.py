"""The checkpoint against its model: every missing, unexpected, mis-shaped and packed tensor, in one error.

Compares names and shapes only and reads no data. Knows nothing of models: what they need arrives as a
table of canonical names and shapes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.names import Fused, NameMap
from headlong.checkpoint.safetensors import TensorInfo
from headlong.errors import CheckpointError

Shape = tuple[int, ...]

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""On-disk dtypes whose values are the weights themselves; in any other they are packed."""


def packed_as(info: TensorInfo) -> str:
    """Why a tensor that is not stored as plain floats is refused."""
    return f"packed as {info.dtype}: quantised checkpoints are not supported yet"


def always(name: str) -> bool:  # noqa: ARG001 - the filter that lets every name pass
    return True


@dataclass
class _Report:
    """Lines of the error to be, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    packed: list[str] = field(default_factory=list)

    def groups(self) -> dict[str, list[str]]:
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "mis-shaped": self.misshaped,
            "packed": self.packed,
        }
        return {kind: lines for kind, lines in kinds.items() if lines}

    def compare(self, name: str, info: TensorInfo, expected: Shape) -> None:
        """One tensor on disk against what the model asks. A packed one has a shape of its own making."""
        if info.dtype not in FLOAT_DTYPES:
            self.packed.append(f"{name} (on disk {info.name}): {packed_as(info)}")
        elif info.shape != expected:
            found = list(info.shape)
            self.misshaped.append(f"{name} (on disk {info.name}): expected {list(expected)}, found {found}")

    def compare_fused(self, fused: Fused, expected: Shape) -> None:
        """Experts stored one by one: each part is missing, mis-shaped or unexpected by its own name."""
        part_shape = fused.part_shape(expected)
        if part_shape is None:
            found = list(fused.shape) if fused.shape else f"{len(fused.parts)} parts"
            self.misshaped.append(f"{fused.name}: expected {list(expected)}, found {found}")
            return
        self.missing.extend(f"{name} {list(part_shape)}" for name in fused.missing(expected[0]))
        for (expert, projection), info in fused.parts.items():
            name = fused.part_name(expert, projection)
            if expert >= expected[0]:
                self.unexpected.append(f"{name} (on disk {info.name}) {list(info.shape)}")
            else:
                self.compare(name, info, part_shape)


def verify(
    expected: Mapping[str, Shape],
    names: NameMap,
    checkpoint: Checkpoint,
    *,
    what: str = "checkpoint",
    prefix_filter: Callable[[str], bool] = always,
    error: type[CheckpointError] = CheckpointError,
) -> None:
    """Raises one `error` listing all that differs between `expected` and the disk, or returns.

    `prefix_filter` picks the canonical names under consideration, so that target and head can be judged
    apart; `what` names the thing judged in the message.
    """
    report = _Report()
    for name, shape in expected.items():
        if not prefix_filter(name):
            continue
        if name not in names:
            report.missing.append(f"{name} {list(shape)}")
        elif name in names.fused:
            report.compare_fused(names.fused[name], tuple(shape))
        else:
            report.compare(name, checkpoint.tensors[names.sources[name][0]], tuple(shape))
    for name, disk_names in names.sources.items():
        if name not in expected and prefix_filter(name):
            for disk_name in disk_names:
                found = list(checkpoint.tensors[disk_name].shape)
                report.unexpected.append(f"{name} (on disk {disk_name}) {found}")
    if groups := report.groups():
        counts = ", ".join(f"{len(lines)} {kind}" for kind, lines in groups.items())
        body = "\n".join(
            f"{kind} ({len(lines)}):\n" + "\n".join(f"  {line}" for line in lines)
            for kind, lines in groups.items()
        )
        raise error(f"{checkpoint.folder}: the {what} does not fit its model: {counts} tensors\n{body}")
