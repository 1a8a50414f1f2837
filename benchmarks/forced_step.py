"""A step in which drafts stand with a given chance, whatever the model says: random weights accept nothing."""

import random

import torch
from torch import Tensor

from headlong.engine.engine import Engine
from headlong.engine.step.device import DeviceStages, Drafted, EvenStep
from headlong.engine.step.device_stepper import DeviceLaunch
from headlong.engine.step.graph import GraphStepper
from headlong.types import Plan


class ForcedStages(DeviceStages):
    """Before the verdict the target's tokens are changed into the drafts, the earlier ones first; all else is the
    engine's own."""

    def __init__(self, engine: Engine) -> None:
        drafter = engine.proposer.device_drafter
        super().__init__(engine.model, engine.state, engine.sampler, drafter, engine.max_len)
        self.stand_R = torch.zeros(engine.state.slots.size, dtype=torch.long, device=self.device)

    def choose(self, plan: EvenStep, draft: Drafted, logits_NV: Tensor) -> Tensor:
        drafts_RK = draft.drafts_RK
        chosen_RJ = super().choose(plan, draft, logits_NV).view(len(drafts_RK), -1).clone()
        place_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
        stands_RK = place_K < self.stand_R[: len(drafts_RK), None]
        chosen_RJ[:, :-1] = torch.where(stands_RK, drafts_RK, chosen_RJ[:, :-1])
        return chosen_RJ.flatten()


class ForcedStep(GraphStepper):
    """Decides by chance which drafts of a step stand."""

    def __init__(self, engine: Engine, rate: float) -> None:
        self.forced = ForcedStages(engine)
        super().__init__(self.forced)
        self.rate, self.rng = rate, random.Random(0)

    def launch(self, plan: Plan, *, goes_on: bool = False) -> DeviceLaunch:
        counts = [0] * len(self.forced.stand_R)
        for number, row in enumerate(plan.rows):
            while counts[number] < row.num_drafts and self.rng.random() < self.rate:
                counts[number] += 1
        self.forced.stand_R.copy_(torch.tensor(counts), non_blocking=True)
        return super().launch(plan, goes_on=goes_on)
