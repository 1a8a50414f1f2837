"""What surrounds the capture of a CUDA graph, without a GPU: graphs themselves are tests/engine/test_cuda.py's."""

import gc
from contextlib import nullcontext

import pytest
import torch

from headlong.ops.cuda_graphs import CudaGraphs


class Recorded:
    """A graph that keeps nothing."""

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        pass


@pytest.fixture
def graphs(monkeypatch) -> CudaGraphs:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda _graph, pool: nullcontext(pool))
    made = CudaGraphs(torch.device("cpu"))
    made._captures = True
    return made


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_captured(graphs, fails):
    """It may hold graphs of an engine that is gone, which cannot be freed meanwhile."""
    seen = []

    def function(given):
        seen.append(gc.isenabled())
        if fails and len(seen) == 2:
            raise RuntimeError("no")
        return given

    for _ in range(2):  # computed, then captured
        graphs("key", function, [torch.zeros(1)])
    assert seen[:2] == [True, False] and gc.isenabled()
    assert len(seen) == 2 + fails, "what cannot be captured is computed"
