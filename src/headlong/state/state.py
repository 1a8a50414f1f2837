"""Everything a sequence leaves behind in the engine, and the one place where a step is settled.

Owns pages, slots, the layers' tensors, the head's carry and each row's last token. `commit` keeps what the
target accepted and forgets the rest, for every kind of state at once. Knows no model and no schedule.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from headlong.state.layer import LayerState, allocate
from headlong.state.pages import Pool
from headlong.state.specs import Capacity, LayerSpec
from headlong.types import Plan, Verdict


@dataclass
class RowState:
    """One sequence's holdings. `length` tokens are settled; `num_replay` of them (the drafts accepted last)
    are still to be replayed into the recurrent memories."""

    slot: int
    length: int = 0
    num_replay: int = 0
    pages: list[int] = field(default_factory=list)


class State:
    """Layers are named as the model names them, the head's among them."""

    def __init__(self, specs: Mapping[str, LayerSpec], hidden_size: int, capacity: Capacity) -> None:
        self.page_size = capacity.page_size
        self.max_drafts = capacity.max_drafts
        self.pages = Pool(capacity.num_pages, "page")
        self.slots = Pool(capacity.num_slots, "slot")
        self.rows: dict[str, RowState] = {}
        self.layers: dict[str, LayerState] = {
            name: allocate(name, spec, capacity) for name, spec in specs.items()
        }
        places, device = capacity.num_slots + 1, capacity.device
        self.carry_SD = torch.zeros(places, hidden_size, dtype=capacity.dtype, device=device)
        """The head's output for the last settled pair: where the next draft starts."""
        self.last_token_S = torch.zeros(places, dtype=torch.long, device=device)
        """Sampled, not yet fed to the model."""

    def admit(self, row_id: str) -> RowState | None:
        """A clean slot for a new row, or None while all are taken."""
        slot = self.slots.take(1)
        if slot is None:
            return None
        for layer in self.layers.values():
            layer.clear(slot[0])
        row = self.rows[row_id] = RowState(slot[0])
        return row

    def reserve(self, row_id: str, length: int) -> bool:
        """Makes room for `length` tokens in all; False, and no change, if pages are short."""
        row = self.rows[row_id]
        pages = self.pages.take(max(0, self.pages_for(length) - len(row.pages)))
        if pages is None:
            return False
        row.pages.extend(pages)
        return True

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def commit(self, plan: Plan, verdict: Verdict) -> None:
        """Settles a step: every row keeps its certain tokens and its accepted drafts, and nothing else."""
        for row_plan, accepted in zip(plan.rows, verdict.accepted, strict=True):
            row = self.rows[row_plan.request.id]
            row.length += row_plan.num_certain + accepted
            row.num_replay = accepted
        sampling = [i for i, row in enumerate(plan.rows) if row.samples]
        if sampling:
            device = verdict.tokens_L.device
            firsts = plan.first_logits
            last = torch.tensor([firsts[i] for i in sampling], device=device)
            last += verdict.accepted_R[torch.tensor(sampling, device=device)]
            slots = torch.tensor([plan.rows[i].slot for i in sampling], device=device)
            self.last_token_S[slots] = verdict.tokens_L[last]

    def release(self, row_id: str) -> None:
        """Frees all that a row held."""
        row = self.rows.pop(row_id)
        self.pages.give_back(row.pages)
        self.slots.give_back([row.slot])

    def check_integrity(self) -> None:
        """Asserts that no page or slot is lost or shared."""
        self.pages.check([page for row in self.rows.values() for page in row.pages])
        self.slots.check([row.slot for row in self.rows.values()])
        for row_id, row in self.rows.items():
            assert len(row.pages) >= self.pages_for(row.length), f"{row_id}: settled tokens without a page"
