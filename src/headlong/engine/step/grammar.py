"""A step of decoding rows of which a grammar holds some to what it allows. That is known on the host alone, so it is
three CUDA graphs: the drafts, of which the first is made among what is allowed; the target's pass, and meanwhile the
host reads the drafts and finds out what may stand after each; and the verdict with its commit.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.engine.step.device import Computed, DeviceStages, Drafted, EvenStep
from headlong.engine.step.device_stepper import DeviceStepper
from headlong.engine.step.readback import Readback
from headlong.engine.step.stages import run
from headlong.ops.cuda_graphs import CudaGraphs
from headlong.sampling.constraints import packed
from headlong.sampling.processors import SamplingSignature
from headlong.types import Constraint, RowPlan


class GrammarStepper(DeviceStepper):
    """The stages as graphs of their own."""

    def __init__(self, stages: DeviceStages) -> None:
        super().__init__(stages)
        self._stages = _GrammarStages(stages, stages.sampler.table.constraints)

    @property
    def is_usual(self) -> bool:
        return self._stages.is_usual

    def suits(self, signature: SamplingSignature) -> bool:
        return signature.constrained

    def run(self, step: EvenStep, rows: Sequence[RowPlan]) -> tuple[Tensor, Tensor]:
        _, hidden_ND, found_X = run(self._stages, _ConstrainedStep(step, rows))
        return found_X, hidden_ND


class _ConstrainedStep(NamedTuple):
    """A step with the rows that the host asks about."""

    step: EvenStep
    rows: Sequence[RowPlan]


class _Drafted(NamedTuple):
    """Drafts on their way to the host."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    """The tensors of `Drafted`. The context is made anew in each graph."""
    drafts_X: Tensor
    ready: torch.cuda.Event | None


class _GrammarStages:
    """Each graph has memory of its own: what it leaves stands until the next step."""

    def __init__(self, stages: DeviceStages, constraints: Mapping[int, Constraint]) -> None:
        """`constraints` by slot, as they are at any time."""
        self._stages, self._constraints = stages, constraints
        self._vocab_size = stages.model.config.vocab_size
        self._draft, self._forward, self._verify = (CudaGraphs(stages.device) for _ in range(3))
        self._readback = Readback()

    @property
    def is_usual(self) -> bool:
        return all(part.is_usual for part in (self._draft, self._forward, self._verify))

    def draft(self, plan: _ConstrainedStep) -> _Drafted:
        step, rows = plan
        firsts = [self._allowed(rows, [[]] * len(rows), each=1)] if step.layout.num_drafts else []

        def draft(given: Sequence[Tensor]) -> Sequence[Tensor]:
            given_R4, *firsts = given
            first_RB = firsts[0] if firsts else None
            return self._stages.draft(step._replace(given_R4=given_R4, first_RB=first_RB))[:-1]

        slots_R, pages_RP, drafts_RK, tokens_N, found_X = self._draft(
            _key(step), draft, [step.given_R4, *firsts]
        )
        tensors = slots_R, pages_RP, drafts_RK, tokens_N, found_X
        return _Drafted(tensors, *self._readback.bring(drafts_RK.flatten()))

    def forward(self, plan: _ConstrainedStep, draft: _Drafted) -> Tensor:
        """Hidden states; the logits are kept."""
        step = plan.step

        slots_R, pages_RP, drafts_RK, tokens_N, found_X = draft.tensors

        def forward(given: Sequence[Tensor]) -> Sequence[Tensor]:
            tokens_N, pages_RP = given
            drafted = self._drafted(step, (slots_R, pages_RP, drafts_RK, tokens_N, found_X))
            computed = self._stages.forward(step, drafted)
            if not step.shape.tells:
                self._stages.keep(computed.logits_NV)
            return (computed.hidden_ND,)

        (hidden_ND,) = self._forward(_key(step), forward, [tokens_N, pages_RP])
        return hidden_ND

    def verify(self, plan: _ConstrainedStep, draft: _Drafted, computed: Tensor) -> Tensor:
        """What will be read back. The commit is in the same graph."""
        step, rows = plan
        if draft.ready is not None:
            draft.ready.synchronize()
        drafted = draft.drafts_X.view(len(rows), step.layout.num_drafts).tolist()
        bits_NB = self._allowed(rows, drafted, each=1 + step.layout.num_drafts)

        def verify(given: Sequence[Tensor]) -> Sequence[Tensor]:
            given_R4, bits_NB, hidden_ND, *tensors = given
            own = step._replace(given_R4=given_R4, bits_NB=bits_NB)
            drafted, computed = (
                self._drafted(own, tensors),
                Computed(hidden_ND, self._stages.kept(len(bits_NB))),
            )
            chosen = self._stages.verify(own, drafted, computed)
            self._stages.commit(own, drafted, computed, chosen)
            return (drafted.found_X,)

        (found_X,) = self._verify(_key(step), verify, [step.given_R4, bits_NB, computed, *draft.tensors])
        return found_X

    def commit(self, plan: _ConstrainedStep, draft: _Drafted, computed: Tensor, verdict: Tensor) -> None:
        """Does nothing: the graph of the verdict committed the step."""

    def _drafted(self, step: EvenStep, tensors: Sequence[Tensor]) -> Drafted:
        slots_R, pages_RP, drafts_RK, tokens_N, found_X = tensors
        context = self._stages.context(step, pages_RP)
        return Drafted(slots_R, pages_RP, drafts_RK, tokens_N, found_X, context)

    def _allowed(self, rows: Sequence[RowPlan], drafted: Sequence[list[int]], *, each: int) -> Tensor:
        """Which tokens may stand at the first `each` places of every row, a bit for each; past a row's own drafts, and
        where nothing is forbidden, all."""
        masks: list[bytes | None] = []
        for row, drafts in zip(rows, drafted, strict=True):
            constraint, count = self._constraints.get(row.slot), min(1 + row.num_drafts, each)
            own = [] if constraint is None else constraint.masks(drafts[: count - 1], 0, count)
            masks += [*own, *[None] * (each - len(own))]
        return packed(masks, self._vocab_size)


def _key(step: EvenStep) -> tuple[object, ...]:
    return step.layout.num_drafts, step.shape
