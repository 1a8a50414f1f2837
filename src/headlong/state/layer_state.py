"""The interface of what one layer keeps of all rows: its tensors, and everything the state does with them.

How a layer state takes part in a step:

- *Reserve.* Its tensors are allocated once, by its spec (`state/specs.py`), with a place for every page or every slot.
  A row's room is its slot and its pages, which `State` hands out for all layers at once. Place 0 of pages and of slots
  belongs to no row: padding writes there.
- *Commit and roll back.* A step's kernels are given two numbers of each row, the length that is committed and how many
  of the newest tokens are drafts that were accepted last and are still to be replayed (`num_replay`). A layer state
  keeps its tensors such that these two numbers alone say what stands; nothing is called, and a rejected draft costs
  nothing. That is also why a step may be launched before the one before it was read: where the two numbers are on the
  device, nobody needs the host. How a kind does this its spec says (`Rollback`).
- *Checkpoint and restore.* What lies on pages is shared page by page. What lies in slots is copied out by `save` at the
  end of a page, or where a row ends, and copied into a cleared slot by `restore`.

CUDA graphs and native programs keep the addresses of these tensors: a layer state never replaces one. Which tensors
there are, and how they are laid out, only the kind and the ops that take its tensors know.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

Saved = tuple[Tensor, ...]
"""Copies of what one layer kept of one row; only the layer state that made them knows what they are."""


class Places(NamedTuple):
    """How many places there are to hand out; place 0 comes on top."""

    pages: int
    slots: int


class LayerState(ABC):
    """One layer's tensors for all rows. A kind that keeps nothing on pages, or nothing in slots, leaves the methods
    that concern them as they are here."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of all its tensors, place 0 included."""

    @abstractmethod
    def check(self, places: Places) -> None:
        """Asserts that its tensors still have the places that were asked for."""

    def copy_page(self, source: int, target: int) -> None:  # noqa: B027
        """Makes the page `target` hold what `source` holds."""

    def clear(self, slot: int) -> None:  # noqa: B027
        """Prepares a slot for a new row, whatever lay there. Pages are not cleared: nobody reads a position before it
        is written."""

    def save(self, slot: int, num_replay: int) -> Saved | None:  # noqa: ARG002
        """Copies of what the slot holds of a row, with its first `num_replay` drafts and no others; None if nothing is
        kept in slots. Changes nothing."""
        return None

    def restore(self, slot: int, saved: Saved) -> None:
        """Puts what `save` gave into a cleared slot, not necessarily the one that it came from. `saved` may lie on
        another device and is not changed."""
        raise AssertionError(
            f"{type(self).__name__} saved nothing of slot {slot}, and is given {len(saved)} tensors"
        )
