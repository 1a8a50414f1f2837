"""Compares a checkpoint with its model: missing, unexpected, mis-shaped and unreadable tensors, in one short error.

Compares headers only and reads no data. Knows nothing of models: what they need arrives as a table.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headlong.checkpoint.detect import Detector
from headlong.checkpoint.load import INTEGERS, Need
from headlong.checkpoint.names import NameMap
from headlong.checkpoint.quant_config import METHODS
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.errors import CheckpointError
from headlong.quant.format import Format

log = logging.getLogger(__name__)
MAX_TOLD = 10
"""Faults that an error lists; the rest is counted and logged."""


def always(name: str) -> bool:  # noqa: ARG001 - the filter that lets every name pass
    return True


@dataclass
class _Report:
    """The lines of the error to be raised, grouped by what is wrong."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    misfitting: list[str] = field(default_factory=list)

    def groups(self) -> dict[str, list[str]]:
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "mis-shaped": self.misshaped,
            "not readable as packed": self.misfitting,
        }
        return {kind: lines for kind, lines in kinds.items() if lines}

    def lines(self, most: int | None = None) -> list[str]:
        """Every fault as a line with its kind; of more than `most` some of each kind."""
        groups = self.groups()
        counts = dict.fromkeys(groups, 0)
        left = sum(len(lines) for lines in groups.values())
        left = left if most is None else min(left, most)
        while left:
            for kind in [kind for kind, lines in groups.items() if counts[kind] < len(lines)][:left]:
                counts[kind] += 1
                left -= 1
        return [f"  {kind}: {line}" for kind, lines in groups.items() for line in lines[: counts[kind]]]


class Verifier:
    """Compares tables of needed tensors with the disk. `formats` is filled on the way: how each matrix is packed."""

    def __init__(self, names: NameMap, detector: Detector) -> None:
        self.names = names
        self.detector = detector
        self.formats: dict[str, Format] = {}

    def verify(
        self,
        expected: Mapping[str, Need],
        *,
        what: str,
        where: object,
        prefix_filter: Callable[[str], bool] = always,
        error: type[CheckpointError] = CheckpointError,
    ) -> None:
        """Raises one `error` listing all that differs between `expected` and the disk, or returns.

        `prefix_filter` picks the canonical names under consideration, so that target and head can be judged
        apart; `what` names the thing judged in the message.
        """
        report = _Report()
        used: set[str] = set()
        for name, need in expected.items():
            if not prefix_filter(name):
                continue
            is_vector = need.role in ("vector", "indices") or (
                need.role == "matrix" and name in self.names.transforms
            )
            parts = self._vector(name) if is_vector else self.names.parts(name)
            used |= {info.name for info in parts.values()}
            if not parts:
                report.missing.append(f"{name} {list(need.shape)}")
            elif is_vector:
                self._compare_vector(name, need, report)
            else:
                self._compare_matrix(name, need, report)
        for name, info in self.names.sources.items():
            if prefix_filter(name) and info.name not in used:
                report.unexpected.append(f"{name} (on disk {info.name}) {list(info.shape)}")
        if groups := report.groups():
            counts = ", ".join(f"{len(lines)} {kind}" for kind, lines in groups.items())
            log.info("%s: all that does not fit:\n%s", where, "\n".join(report.lines()))
            shown = report.lines(MAX_TOLD)
            if (left := sum(len(lines) for lines in groups.values()) - len(shown)) > 0:
                shown.append(f"  and {left} more, which --verbose lists")
            first = f"{where}: the {what} does not fit its model: {counts} tensors{self._method()}"
            raise error("\n".join([first, *shown]))

    def _method(self) -> str:
        """What the config says of the quantisation, for the first line of a refusal."""
        method = self.detector.config.method
        if method is None:
            return ""
        return f" (quant_method {method!r}{'' if method in METHODS else ', which Headlong does not read'})"

    def _vector(self, name: str) -> dict[str, TensorInfo]:
        info = self.names.sources.get(name)
        return {} if info is None else {"weight": info}

    def _compare_vector(self, name: str, need: Need, report: _Report) -> None:
        info = self.names.sources[name]
        transform = self.names.transforms.get(name)
        shape = info.shape if transform is None else transform.model_shape(info.shape)
        if shape != need.shape:
            found = list(info.shape)
            report.misshaped.append(
                f"{name} (on disk {info.name}): expected {list(need.shape)}, found {found}"
            )
        elif need.role == "indices" and info.dtype not in INTEGERS:
            report.misfitting.append(
                f"{name} (on disk {info.name}): must be whole numbers, found {info.dtype}"
            )
        elif need.role != "indices" and not info.is_float:
            report.misfitting.append(f"{name} (on disk {info.name}): must be floats, found {info.dtype}")

    def _compare_matrix(self, name: str, need: Need, report: _Report) -> None:
        parts = self.names.parts(name)
        info = parts.get("weight")
        if list(parts) == ["weight"] and info is not None and info.is_float:
            expected = self.names.transform_of(info).disk_shape(need.shape)
            if info.shape != expected:
                found = list(info.shape)
                report.misshaped.append(
                    f"{name} (on disk {info.name}): expected {list(expected)}, found {found}"
                )
                return
        try:
            self.formats[name] = self.detector.format(name, need.shape)
        except CheckpointError as error:
            report.misfitting.append(str(error))
