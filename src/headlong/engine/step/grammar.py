"""A step of rows of which a grammar holds some to what it allows. That is known on the host alone, so it is three
launches: the drafts, of which the first is made among what is allowed; the target's pass, and meanwhile the host reads
the drafts and finds out what may stand after each; and the verdict.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headlong.engine.step.device import Begun, DeviceStep, Shape
from headlong.engine.step.layout import EvenLayout
from headlong.engine.step.readback import Readback
from headlong.ops.cuda_graphs import CudaGraphs
from headlong.sampling.constraints import packed
from headlong.types import Constraint, RowPlan


class ConstrainedStep:
    """Each part has recordings, and memory, of its own: what it leaves stands until the next step."""

    def __init__(self, step: DeviceStep, constraints: Mapping[int, Constraint], device: torch.device) -> None:
        """`constraints` by slot, as they are at any time."""
        self._step, self._constraints = step, constraints
        self._vocab_size = step.model.config.vocab_size
        self._begin, self._verify, self._settle = (CudaGraphs(device) for _ in range(3))
        self._readings = Readback()

    @property
    def is_usual(self) -> bool:
        """Whether nothing of the last step was compiled or recorded on the way."""
        return all(part.is_usual for part in (self._begin, self._verify, self._settle))

    def __call__(
        self, layout: EvenLayout, shape: Shape, given_R4: Tensor, rows: Sequence[RowPlan]
    ) -> tuple[Tensor, Tensor]:
        """What comes back, and hidden states."""
        step, key, drafts = self._step, (layout.num_drafts, shape), layout.num_drafts
        firsts = [self._allowed(rows, [[]] * len(rows), each=1)] if drafts else []
        begun = Begun(*self._begin(key, lambda at: step.begin(layout, shape, *at)[0], [given_R4, *firsts]))
        drafts_X, ready = self._readings.bring(begun.drafts_RK.flatten())

        def verify(at: Sequence[Tensor]) -> Sequence[Tensor]:
            tokens_N, pages_RP = at
            hidden_ND, logits_NV = step.verify(tokens_N, step.contexts(layout, shape, pages_RP)[0])
            step.keep(logits_NV)
            return (hidden_ND,)

        (hidden_ND,) = self._verify(key, verify, [begun.tokens_N, begun.pages_RP])
        if ready is not None:
            ready.synchronize()
        drafted = drafts_X.view(len(rows), drafts).tolist()
        bits_NB = self._allowed(rows, drafted, each=1 + drafts)

        def settle(at: Sequence[Tensor]) -> Sequence[Tensor]:
            given_R4, bits_NB, hidden_ND, *rest = at
            begun = Begun(*rest)
            context, logits_NV = step.contexts(layout, shape, begun.pages_RP)[0], step.kept(len(bits_NB))
            return (step.settle(layout, shape, given_R4, begun, context, hidden_ND, logits_NV, bits_NB),)

        (found_X,) = self._settle(key, settle, [given_R4, bits_NB, hidden_ND, *begun])
        return found_X, hidden_ND

    def _allowed(self, rows: Sequence[RowPlan], drafted: Sequence[list[int]], *, each: int) -> Tensor:
        """Which tokens may stand at the first `each` places of every row, a bit for each; past a row's own drafts, and
        where nothing is forbidden, all."""
        masks: list[bytes | None] = []
        for row, drafts in zip(rows, drafted, strict=True):
            constraint, count = self._constraints.get(row.slot), min(1 + row.num_drafts, each)
            own = [] if constraint is None else constraint.masks(drafts[: count - 1], 0, count)
            masks += [*own, *[None] * (each - len(own))]
        return packed(masks, self._vocab_size)
