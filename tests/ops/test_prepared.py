"""What a step's layers share, as CUDA graphs need it: all but tensors in a key, and read from other tensors."""

import pytest
import torch

from headlong.layers.context import Context
from headlong.ops.native_step import NativeStep
from headlong.ops.rope.reference import Rotary, angles
from headlong.ops.triton_step import TritonStep
from headlong.types import Rows

CPU = torch.device("cpu")
ROWS = Rows((1, 2), (5, 0), (1, 3), (0, 2), (0, 0))
PAGES = torch.tensor([[1, 2], [3, 4]])


def context(rows: Rows, *, recurrent: bool) -> Context:
    step = TritonStep.of(rows, PAGES, 16)
    rotation = angles(torch.tensor([5, 0, 1, 2]), Rotary.of(10000.0, 8, 8, CPU), torch.float32)
    return Context(rotation, step, step if recurrent else None)


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_step_is_read_from_other_tensors(recurrent):
    made = context(ROWS, recurrent=recurrent)
    copies = [tensor.clone() for tensor in made.tensors]
    over = made.over(copies)
    assert over.key == made.key
    assert all(a is b for a, b in zip(over.tensors, copies, strict=True))
    assert (over.delta_net is over.attention) if recurrent else over.delta_net is None


def test_the_key_tells_apart_what_a_graph_depends_on():
    wider = ROWS._replace(query_lens=(1, 4))
    further = ROWS._replace(starts=(5000, 0))
    keys = {context(ROWS, recurrent=recurrent).key for recurrent in (False, True)}
    keys |= {context(rows, recurrent=True).key for rows in (wider, further)}
    assert len(keys) == 4
    assert context(ROWS._replace(starts=(6, 1)), recurrent=True).key in keys


def test_a_step_of_a_host_is_not_captured():
    with pytest.raises(NotImplementedError, match="NativeStep cannot be captured"):
        _ = NativeStep.of(ROWS, PAGES).key
