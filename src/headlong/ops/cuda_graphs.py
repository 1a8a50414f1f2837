"""CUDA graphs of a function of tensors: captured once for each shape, replayed with new values after that.

What is captured must not read anything back and must find its state where it was. A shape is computed eagerly when it
is first seen, which also compiles the kernels it needs, and captured when it comes again. Where nothing can be
captured, everything is computed eagerly. Knows nothing of what is computed.
"""

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

log = logging.getLogger(__name__)
MAX_GRAPHS = 64
"""The most graphs that are kept; of more, the least recently used one is dropped."""

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    """The tensors from which the captured function reads."""
    outputs: tuple[Tensor, ...]
    copied: list[Tensor | None]
    """The host tensors that were copied into each input last; None where an input came from the device."""


class CudaGraphs:
    """The CUDA graphs of one function. All graphs share their memory: what one leaves there is valid until the next one
    runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captures = device.type == "cuda"
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self._pool = None
        self.is_usual = True
        """Whether the last call took as long as such calls do: it was replayed, or nothing is captured here."""

    def __call__(self, key: Hashable, function: Function, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns what `function` makes of these tensors. They may be on the host, and must not be changed then: a
        tensor that comes a second time is not copied again. `key` holds all that the result depends on besides the
        tensors' values and shapes. The caller copies what it wants to keep beyond the next call."""
        key = (key, tuple(tensor.shape for tensor in given))
        graph = self._graphs.get(key)
        self.is_usual = graph is not None or not self._captures
        if graph is None and self._captures and key in self._graphs:
            graph = self._capture(key, function, given)
        if graph is None:
            self._remember(key, None)
            return function([tensor.to(self._device) for tensor in given])
        self._graphs.move_to_end(key)
        for number, (place, tensor) in enumerate(zip(graph.inputs, given, strict=True)):
            if tensor is not graph.copied[number]:
                place.copy_(tensor, non_blocking=True)
                graph.copied[number] = _if_on_host(tensor)
        graph.graph.replay()
        return graph.outputs

    def _capture(self, key: Hashable, function: Function, given: Sequence[Tensor]) -> _Graph | None:
        """Captures a graph, or returns None if that cannot be done: nothing was computed then."""
        inputs = tuple(tensor.to(self._device, copy=True) for tensor in given)
        torch.cuda.synchronize()
        cuda_graph = torch.cuda.CUDAGraph()
        try:
            with _without_collection(), torch.cuda.graph(cuda_graph, pool=self._pool):
                outputs = tuple(function(inputs))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            log.warning("steps are not captured as CUDA graphs any more, and take longer: %s", error)
            self._captures = False
            self._graphs.clear()
            return None
        self._pool = self._pool or cuda_graph.pool()
        graph = _Graph(cuda_graph, inputs, outputs, [_if_on_host(tensor) for tensor in given])
        self._remember(key, graph)
        return graph

    def _remember(self, key: Hashable, graph: _Graph | None) -> None:
        if not self._captures:
            return
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keeps Python from collecting garbage meanwhile: that may hold another engine's graphs, which cannot be freed
    during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _if_on_host(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.device.type == "cpu" else None
