"""Steps in which drafts stand with a given chance, whatever the model says: random weights accept nothing."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headlong.engine.engine import Engine
from headlong.engine.step.device import DeviceStages, Drafted, EvenStep
from headlong.engine.step.device_stepper import DeviceLaunch
from headlong.engine.step.grammar import GrammarStepper
from headlong.engine.step.graph import GraphStepper
from headlong.types import Plan


class ForcedStages(DeviceStages):
    """Before the verdict the target's tokens are changed into the drafts, the earlier ones first; all else is the
    engine's own."""

    def __init__(self, engine: Engine, rate: float) -> None:
        drafter = engine.proposer.device_drafter
        super().__init__(engine.model, engine.state, engine.sampler, drafter, engine.max_len)
        self.rate, self.rng = rate, random.Random(0)
        self.stand_R = torch.zeros(engine.state.slots.size, dtype=torch.long, device=self.device)

    def decide(self, plan: Plan) -> None:
        """Decides by chance how many drafts of each row stand in the step that is launched next."""
        counts = [0] * len(self.stand_R)
        for number, row in enumerate(plan.rows):
            while counts[number] < row.num_drafts and self.rng.random() < self.rate:
                counts[number] += 1
        self.stand_R.copy_(torch.tensor(counts), non_blocking=True)

    def choose(self, plan: EvenStep, draft: Drafted, logits_NV: Tensor) -> Tensor:
        drafts_RK = draft.drafts_RK
        chosen_RJ = super().choose(plan, draft, logits_NV).view(len(drafts_RK), -1).clone()
        place_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
        stands_RK = place_K < self.stand_R[: len(drafts_RK), None]
        chosen_RJ[:, :-1] = torch.where(stands_RK, drafts_RK, chosen_RJ[:, :-1])
        return chosen_RJ.flatten()


@contextmanager
def forced_steps(engine: Engine, rate: float) -> Iterator[None]:
    """Inside it, the engine's CUDA graphs, with a grammar or without, are those of forced stages."""
    steppers, stages = engine.steppers, ForcedStages(engine, rate)
    honest = steppers.graph, steppers.grammar
    steppers.graph, steppers.grammar = GraphStepper(stages), GrammarStepper(stages)
    for stepper in (steppers.graph, steppers.grammar):
        stepper.launch = _deciding(stages, stepper.launch)  # type: ignore[method-assign]
    try:
        yield
    finally:
        steppers.graph, steppers.grammar = honest


def _deciding(stages: ForcedStages, launch: Any) -> Any:
    def decide_and_launch(plan: Plan, **how: bool) -> DeviceLaunch:
        stages.decide(plan)
        return launch(plan, **how)

    return decide_and_launch
