"""Where an engine's memory goes: what is planned before any state is made, and the refusal of what cannot fit.

On a GPU the engine may take `gpu_memory_fraction` of all there is. Weights come first, then what was asked for by
number, then a reserve for CUDA graphs and workspace; pages whose number nobody gave take what is left. Elsewhere the
plan only reports. Arithmetic over numbers: knows no tensor and asks no device.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from headlong.config import EngineConfig
from headlong.errors import ConfigError
from headlong.state.specs import CHECKPOINTS_PER_SLOT

FINEST_FRACTION = 1000
"""Fractions are proposed in thousandths."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device's memory in bytes. `free` is what this process may still take now that the weights are loaded; it is
    None where nothing limits the engine."""

    name: str
    total: int | None
    free: int | None = None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Bytes of each thing an engine consists of, before it is known how many pages and slots there will be. Layers'
    specs counted what a page, a slot and a checkpoint take."""

    target: int
    """The target's weights, as they are stored in memory."""
    head: int = 0
    drafter: int = 0
    page: int
    """One page of all layers that keep anything on pages, the head's and a draft model's too."""
    slot: int
    """One slot: what layers keep there, the head's carry and the last token."""
    checkpoint: int = 0
    """What the prefix cache saves of a slot at one position of a sequence."""
    reserve: int = 0
    """CUDA graphs and workspace, however many rows there are."""
    reserve_per_row: int = 0

    @property
    def weights(self) -> int:
        return self.target + self.head + self.drafter


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory that an engine takes, in bytes; place 0 of pages and slots is included."""

    device: str
    device_bytes: int | None
    """All memory of the device; None where that is not known."""
    limit_bytes: int | None
    """How much of it the engine may take; None where nothing limits it."""
    target_bytes: int
    head_bytes: int
    drafter_bytes: int
    kv_bytes: int
    slot_bytes: int
    checkpoint_bytes: int
    """The most that checkpoints may take; they are allocated as they are saved."""
    reserve_bytes: int
    """Kept free for CUDA graphs, activations and logits. It is an estimate."""
    num_pages: int
    page_size: int
    num_slots: int
    max_len: int
    """The longest sequence that the engine accepts, in tokens."""

    @property
    def total_bytes(self) -> int:
        weights = self.target_bytes + self.head_bytes + self.drafter_bytes
        return weights + self.kv_bytes + self.slot_bytes + self.checkpoint_bytes + self.reserve_bytes

    @property
    def full_rows(self) -> float:
        """How many sequences of `max_len` tokens the pages hold at once."""
        return self.num_pages * self.page_size / self.max_len

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_bytes": self.total_bytes}

    def lines(self) -> list[str]:
        """A small table for people. Each line can be logged on its own."""
        entries = list(self._entries())
        width = max(len(what) for what, _, _ in entries)
        return [
            f"memory: {what:<{width}} {sized(count):>10}  {note}".rstrip() for what, count, note in entries
        ]

    def _entries(self) -> Iterator[tuple[str, int, str]]:
        yield "weights", self.target_bytes, ""
        if self.head_bytes:
            yield "head's weights", self.head_bytes, ""
        if self.drafter_bytes:
            yield "draft model's weights", self.drafter_bytes, ""
        tokens = self.num_pages * self.page_size
        full = f"{self.full_rows:.1f} sequences of {self.max_len:,}"
        yield (
            "pages",
            self.kv_bytes,
            f"{self.num_pages:,} of {self.page_size} tokens: {tokens:,}, or {full}",
        )
        yield "slots", self.slot_bytes, f"max_rows {self.num_slots}, and a spare one"
        if self.checkpoint_bytes:
            yield "checkpoints", self.checkpoint_bytes, "at most"
        if self.reserve_bytes:
            yield "graphs, workspace", self.reserve_bytes, "kept free"
        limit = "" if self.limit_bytes is None else f"of {sized(self.limit_bytes)} that may be taken"
        device = "" if self.device_bytes is None else f"; {self.device} has {sized(self.device_bytes)}"
        yield "total", self.total_bytes, (limit + device).removeprefix("; ")


def make_plan(config: EngineConfig, max_position: int, costs: Costs, device: Device) -> MemoryPlan:
    """Decides how much of everything there will be. Raises ConfigError, which names what would fit, where the config
    asks for too much."""
    if device.free is None:
        max_len, num_pages = config.resolve_context(max_position)
        checkpoints, limit, reserve = _wished_checkpoints(config, costs, config.max_rows), None, 0
    else:
        sizing = _Sizing(config, max_position, costs, device)
        max_len, num_pages, checkpoints = sizing.divide()
        limit, reserve = sizing.limit, sizing.reserve(config.max_rows)
    return MemoryPlan(
        device=device.name,
        device_bytes=device.total,
        limit_bytes=limit,
        target_bytes=costs.target,
        head_bytes=costs.head,
        drafter_bytes=costs.drafter,
        kv_bytes=(num_pages + 1) * costs.page,
        slot_bytes=(config.max_rows + 1) * costs.slot,
        checkpoint_bytes=checkpoints,
        reserve_bytes=reserve,
        num_pages=num_pages,
        page_size=config.page_size,
        num_slots=config.max_rows,
        max_len=max_len,
    )


def sized(count: int) -> str:
    """A number of bytes for people to read: `41.2 GiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} B"


def _wished_checkpoints(config: EngineConfig, costs: Costs, rows: int) -> int:
    if not config.prefix_cache:
        return 0
    if config.prefix_device_bytes is not None:
        return config.prefix_device_bytes
    return CHECKPOINTS_PER_SLOT * rows * costs.checkpoint


class _Sizing:
    """Divides a GPU's memory. What the config asks for by number comes first; where it gives no number of bytes for
    checkpoints, they take at most half of what is left then."""

    def __init__(self, config: EngineConfig, max_position: int, costs: Costs, device: Device) -> None:
        assert device.free is not None and device.total is not None
        self.config, self.costs, self.free, self.total = config, costs, device.free, device.total
        self.share = round(config.gpu_memory_fraction * device.total)
        self.limit = min(self.share, device.free + costs.weights)
        self.context = config.longest(max_position)
        self.row_pages = -(-self.context // config.page_size)

    def reserve(self, rows: int) -> int:
        return self.costs.reserve + rows * self.costs.reserve_per_row

    def divide(self) -> tuple[int, int, int]:
        """Gives (longest sequence, number of pages, bytes of checkpoints)."""
        config, needed, rows = self.config, self._needed_pages(), self.config.max_rows
        if self._most_pages(rows) < needed:
            raise ConfigError(self._refusal(needed))
        if config.cache_tokens is not None:
            max_len, _ = config.resolve_context(self.context)
            return max_len, needed, self._checkpoints(needed)
        checkpoints = self._checkpoints(needed)
        left = (self._left(rows) - checkpoints) // self.costs.page - 1
        num_pages = min(left, rows * self.row_pages)
        return min(self.context, num_pages * config.page_size), num_pages, checkpoints

    def _needed_pages(self) -> int:
        """The fewest pages that hold what the config asks for by number: the whole cache, or one sequence."""
        if self.config.cache_tokens is not None:
            return -(-self.config.cache_tokens // self.config.page_size)
        return self.row_pages if self.config.max_context is not None else 1

    def _left(self, rows: int) -> int:
        """Bytes that are left for pages and checkpoints."""
        return self.limit - self.costs.weights - (rows + 1) * self.costs.slot - self.reserve(rows)

    def _most_bytes(self, rows: int) -> int:
        """Bytes that are left for pages if checkpoints take what the config gives them by number, and nothing
        otherwise. May be negative."""
        promised = 0 if self.config.prefix_device_bytes is None else self._wished(rows)
        return self._left(rows) - promised

    def _most_pages(self, rows: int) -> int:
        return self._most_bytes(rows) // self.costs.page - 1

    def _checkpoints(self, num_pages: int) -> int:
        rows = self.config.max_rows
        if self.config.prefix_device_bytes is not None:
            return self._wished(rows)
        rest = self._left(rows) - (num_pages + 1) * self.costs.page
        return min(self._wished(rows), rest // 2)

    def _wished(self, rows: int) -> int:
        return _wished_checkpoints(self.config, self.costs, rows)

    def _refusal(self, needed: int) -> str:
        config, costs, rows = self.config, self.costs, self.config.max_rows
        if config.cache_tokens is not None:
            asked = f"cache_tokens {config.cache_tokens}"
        elif config.max_context is not None:
            asked = f"max_context {self.context}"
        else:
            asked = f"a sequence of {config.page_size} tokens"
        taken = [
            f"{sized(costs.weights)} of weights",
            f"{sized((rows + 1) * costs.slot)} for {rows} rows",
            f"{sized(self.reserve(rows))} for graphs and workspace",
        ]
        if config.prefix_device_bytes and config.prefix_cache:
            taken.append(f"{sized(config.prefix_device_bytes)} of checkpoints")
        of = f"{config.gpu_memory_fraction:g} x {sized(self.total)}"
        if self.limit < self.share:
            of = f"the {sized(self.limit)} that others leave of {sized(self.total)}"
        left = max(0, self._most_bytes(rows))
        return (
            f"{asked} needs {sized((needed + 1) * costs.page)} of pages; {sized(left)} are left of {of} after "
            f"{', '.join(taken[:-1])} and {taken[-1]}: {self._advice(needed)}"
        )

    def _advice(self, needed: int) -> str:
        """The settings that would fit instead, each by itself."""
        config, rows, ways = self.config, self.config.max_rows, []
        tokens = self._most_pages(rows) * config.page_size
        asked = [name for name in ("cache_tokens", "max_context") if (getattr(config, name) or 0) > tokens]
        if tokens > 0 and asked:
            ways.append(" with ".join(f"{name}<={tokens}" for name in asked))
        fewer = next((count for count in range(rows - 1, 0, -1) if self._most_pages(count) >= needed), None)
        if fewer is not None:
            ways.append(f"max_rows<={fewer}")
        missing = (needed + 1) * self.costs.page - self._most_bytes(rows)
        kept = config.prefix_device_bytes if config.prefix_cache else None
        if kept is not None and kept >= missing:
            ways.append(f"prefix_device_bytes<={kept - missing}")
        fraction = -(-(self.limit + missing) * FINEST_FRACTION // self.total) / FINEST_FRACTION
        if (
            self.limit == self.share
            and fraction <= 1
            and fraction * self.total <= self.free + self.costs.weights
        ):
            ways.append(f"gpu_memory_fraction>={fraction:g}")
        return f"use {', or '.join(ways) or 'a smaller or narrower model, or another device'}"
