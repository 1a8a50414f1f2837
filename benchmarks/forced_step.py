"""A step in which drafts stand with a given chance, whatever the model says: random weights accept nothing."""

import random

import torch
from torch import Tensor

from headlong.engine.engine import Engine
from headlong.engine.step.graph import Launch, WholeStep
from headlong.types import Plan


class ForcedStep(WholeStep):
    """Before the verdict the target's tokens are changed into the drafts, the earlier ones first; all else is the
    engine's own."""

    def __init__(self, engine: Engine, rate: float) -> None:
        assert engine.whole is not None
        super().__init__(engine.model, engine.state, engine.sampler, engine.whole.drafter, engine.max_len)
        self.device_step.chosen = self._chosen
        self.rate, self.rng = rate, random.Random(0)
        self.stand_R = torch.zeros(engine.state.slots.size, dtype=torch.long, device=engine.model.ops.device)

    def launch(self, plan: Plan, *, goes_on: bool = False) -> Launch:
        counts = [0] * len(self.stand_R)
        for number, row in enumerate(plan.rows):
            while counts[number] < row.num_drafts and self.rng.random() < self.rate:
                counts[number] += 1
        self.stand_R.copy_(torch.tensor(counts), non_blocking=True)
        return super().launch(plan, goes_on=goes_on)

    def _chosen(self, chosen_N: Tensor, drafts_RK: Tensor) -> Tensor:
        chosen_RJ = chosen_N.view(len(drafts_RK), -1).clone()
        place_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
        stands_RK = place_K < self.stand_R[: len(drafts_RK), None]
        chosen_RJ[:, :-1] = torch.where(stands_RK, drafts_RK, chosen_RJ[:, :-1])
        return chosen_RJ.flatten()
