"""Values that pass between stages, and may pass between processes."""

import pickle

from headlong.params import SamplingParams
from headlong.types import Plan, Request, RowPlan


class Stop:
    """A stop rule that cannot travel."""

    def __init__(self) -> None:
        self.judge = lambda row_ids, confidences: ([True] * len(row_ids), [True] * len(confidences))


def test_a_plan_travels_without_the_functions_that_follow_it():
    params = SamplingParams(max_tokens=4, logit_bias={3: 0.5}, stop=("x",), temperature=0.5)
    request = Request("a", (1, 2), params, seed=7, stop_ids=frozenset({5}), constraint=lambda: None)  # type: ignore
    row = RowPlan(request, 1, 4, 3, 2, 1, (8, 9), True, 2, ())
    plan = Plan((row,), 2, Stop())
    there = pickle.loads(pickle.dumps(plan))
    assert there == plan and there.rows == plan.rows and there.rows[0].request == request
    assert there.draft_stop is None and there.rows[0].request.constraint is None
    assert plan.draft_stop is not None and request.constraint is not None
