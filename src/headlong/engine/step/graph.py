"""A step of decoding rows as one CUDA graph: drafts, the target's pass, the verdict, its commit and the head's reading.

Nothing is read back on the way, and what comes back is one small tensor.
"""

from collections.abc import Sequence

from torch import Tensor

from headlong.engine.step.device import DeviceStages, EvenStep
from headlong.engine.step.device_stepper import DeviceLaunch, DeviceStepper
from headlong.engine.step.stages import run
from headlong.engine.step.stepper import Launch
from headlong.ops.cuda_graphs import CudaGraphs
from headlong.sampling.processors import SamplingSignature
from headlong.state.row_table import MOST_STOPS
from headlong.types import Plan, RowPlan


class GraphStepper(DeviceStepper):
    """Captured once for each shape of a step."""

    def __init__(self, stages: DeviceStages) -> None:
        super().__init__(stages)
        self._graphs = CudaGraphs(stages.device)

    @property
    def is_usual(self) -> bool:
        return self._graphs.is_usual

    def suits(self, signature: SamplingSignature) -> bool:
        return not signature.constrained

    def run(self, step: EvenStep, rows: Sequence[RowPlan]) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        def whole(given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            draft, computed, _ = run(self.stages, step._replace(given_R4=given[0]))
            return draft.found_X, computed.hidden_ND

        found_X, hidden_ND = self._graphs((step.layout.num_drafts, step.shape), whole, [step.given_R4])
        return found_X, hidden_ND

    def may_follow(self, launch: Launch, plan: Plan) -> bool:
        """Whether this step can be launched before the other is read: the head must lack nothing that only then is
        known, and the device know by itself which rows have ended."""
        if any(len(row.request.stop_ids) > MOST_STOPS for row in plan.rows) or not self.takes(plan):
            return False
        if any(row.request.params.asks_host for row in plan.rows):
            return False
        drafter = self.stages.drafter
        reads = isinstance(launch, DeviceLaunch) and launch.reads
        return drafter is None or reads or not drafter.reads(plan)
