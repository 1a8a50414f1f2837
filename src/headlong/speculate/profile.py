"""Costs measured beforehand, kept in the user's cache folder by model and machine.

Written by `headlong tune`, read where an engine starts. A file that is damaged or of another kind is ignored, and a log
line says so: an engine without a profile learns the same by itself. Knows no engine.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headlong.models.config import ModelConfig
from headlong.speculate import stored

VERSION = 1
MAX_COSTS, MAX_BYTES = 1024, 1 << 20


@dataclass(frozen=True)
class Cost:
    """Seconds of a step in which `rows` rows draft `depth` tokens each."""

    rows: int
    depth: int
    verify: float
    draft: float

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot have been measured."""
        for name, low, high in (("rows", 1, 1 << 16), ("depth", 0, 64)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}")
        for name, low in (("verify", 1e-9), ("draft", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= 3600.0:
                raise ValueError(f"{name} is {value!r}")


@dataclass(frozen=True)
class Profile:
    """What was measured, and where."""

    conditions: Mapping[str, Any]
    costs: tuple[Cost, ...]


def conditions(config: ModelConfig, dtype: torch.dtype, device: torch.device, drafter: str) -> dict[str, Any]:
    """All that costs depend on: a profile serves where these are the same. `drafter` names who drafts and how it is
    kept."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    return {
        "model": hashlib.sha256(repr(config).encode()).hexdigest()[:16],
        "drafter": drafter,
        "dtype": str(dtype).removeprefix("torch."),
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def path_of(conditions: Mapping[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:24]
    return stored.place("costs", key)


def load(conditions: Mapping[str, Any]) -> Profile | None:
    """What `save` wrote under these conditions; None if nothing did."""

    def parse(data: Any) -> Profile:
        costs = tuple(Cost(**entry) for entry in data["costs"])
        if not 0 < len(costs) <= MAX_COSTS:
            raise ValueError(f"it has {len(costs)} costs")
        return Profile(conditions, costs)

    made_for = {"version": VERSION, "conditions": conditions}
    return stored.load(partial(path_of, conditions), MAX_BYTES, made_for, parse, "tune")


def save(profile: Profile) -> Path:
    file = path_of(profile.conditions)
    data = {
        "version": VERSION,
        "conditions": dict(profile.conditions),
        "costs": [asdict(cost) for cost in profile.costs],
    }
    stored.write(file, data)
    return file


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
