"""CUDA graphs of a function of tensors: recorded once for each shape, replayed with new values after that.

What is recorded must not read anything back and must find its state where it was. A shape is computed as it is when it
is first seen, which also compiles what it needs, and recorded when it comes again. Knows nothing of what is computed.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_GRAPHS = 64
"""The one not used for longest goes."""

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, ...]
    """Where the recorded function reads."""
    found: tuple[Tensor, ...]


class Graphs:
    """All recordings share their memory: what one leaves there is copied before the next one runs."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self._pool = None

    def __call__(self, key: Hashable, function: Function, given: Sequence[Tensor]) -> list[Tensor]:
        """What `function` makes of these tensors. `key` says all that it depends on besides their values and shapes."""
        key = (key, tuple(tensor.shape for tensor in given))
        if key not in self._graphs:
            self._graphs[key] = None
            return list(function(given))
        self._graphs.move_to_end(key)
        graph = self._graphs[key] or self._record(key, function, given)
        for place, tensor in zip(graph.given, given, strict=True):
            place.copy_(tensor)
        graph.graph.replay()
        return [tensor.clone() for tensor in graph.found]

    def _record(self, key: Hashable, function: Function, given: Sequence[Tensor]) -> _Graph:
        places = tuple(tensor.clone() for tensor in given)
        torch.cuda.synchronize()
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording, pool=self._pool):
            found = tuple(function(places))
        self._pool = self._pool or recording.pool()
        graph = self._graphs[key] = _Graph(recording, places, found)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph
