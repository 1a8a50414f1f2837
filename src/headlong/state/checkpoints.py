"""Copies of what slots held at some length, in two bounded stores: on the device, then in host memory.

The least recently used go from the first to the second, and from there away. Knows keys and bytes, not the tokens
a key stands for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """Everything a row's future depends on besides its pages."""

    layers: dict[str, tuple[Tensor, ...]]
    """What each layer saved, by its name."""
    num_replay: int
    """Accepted drafts among the saved that the recurrent memories have not seen yet."""
    hidden_D: Tensor | None = None
    """The target's last hidden state, where there is a head that pairs it with the token to come."""

    @property
    def num_bytes(self) -> int:
        hidden = () if self.hidden_D is None else (self.hidden_D,)
        return sum(tensor.nbytes for tensors in (*self.layers.values(), hidden) for tensor in tensors)

    def to(self, device: torch.device) -> "Checkpoint":
        layers = {name: tuple(t.to(device) for t in tensors) for name, tensors in self.layers.items()}
        hidden = None if self.hidden_D is None else self.hidden_D.to(device)
        return Checkpoint(layers, self.num_replay, hidden)


class _Shelf:
    """Checkpoints of one kind of memory, the least recently used first."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.device = device
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.items: dict[bytes, Checkpoint] = {}

    def put(self, key: bytes, checkpoint: Checkpoint) -> list[tuple[bytes, Checkpoint]]:
        """Stores a checkpoint and gives those that were evicted for it, oldest first; the checkpoint itself is among
        them if it is larger than the whole shelf."""
        if checkpoint.num_bytes > self.max_bytes:
            return [(key, checkpoint)]
        self.items[key] = checkpoint.to(self.device)
        self.num_bytes += checkpoint.num_bytes
        pushed_out = []
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self.items))
            pushed_out.append((oldest, self.pop(oldest)))
        return pushed_out

    def pop(self, key: bytes) -> Checkpoint:
        checkpoint = self.items.pop(key)
        self.num_bytes -= checkpoint.num_bytes
        return checkpoint

    def check(self) -> None:
        assert self.num_bytes == sum(c.num_bytes for c in self.items.values()), "checkpoints are miscounted"
        assert self.num_bytes <= self.max_bytes, "more checkpoints than there is room for"


class CheckpointStore:
    """Checkpoints by key. What was used last is on the device."""

    def __init__(
        self, device: torch.device, device_bytes: int, host_bytes: int, dropped: Callable[[bytes], None]
    ) -> None:
        """`dropped` is told of each checkpoint that found no room."""
        self._near = _Shelf(device, device_bytes)
        self._far = _Shelf(torch.device("cpu"), host_bytes)
        self._dropped = dropped

    def __contains__(self, key: bytes) -> bool:
        return key in self._near.items or key in self._far.items

    def __len__(self) -> int:
        return len(self._near.items) + len(self._far.items)

    @property
    def keys(self) -> set[bytes]:
        return {*self._near.items, *self._far.items}

    def recent(self) -> list[bytes]:
        """All keys, the last used first."""
        return [*self._far.items, *self._near.items][::-1]

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of checkpoints on the device, and in host memory."""
        return self._near.num_bytes, self._far.num_bytes

    def put(self, key: bytes, checkpoint: Checkpoint) -> bool:
        """Stores a checkpoint; gives whether there was room for it."""
        assert key not in self
        for pushed, old in self._near.put(key, checkpoint):
            for gone, _ in self._far.put(pushed, old):
                self._dropped(gone)
        return key in self

    def use(self, key: bytes) -> Checkpoint:
        """Gives a checkpoint, which is then the most recently used one."""
        shelf = self._near if key in self._near.items else self._far
        checkpoint = shelf.pop(key)
        self.put(key, checkpoint)
        return checkpoint

    def drop(self, key: bytes) -> None:
        """Forgets a checkpoint, if it is there."""
        for shelf in (self._near, self._far):
            if key in shelf.items:
                shelf.pop(key)

    def check(self) -> None:
        for shelf in (self._near, self._far):
            shelf.check()
        assert not self._near.items.keys() & self._far.items.keys(), "a checkpoint is in both stores"
