"""The layers of a model or of a head one after the other, and what comes before and after them.

What flows from layer to layer is one residual stream or several. What a pass gives is what an MTP head taps; `finish`
makes of it what the lm_head takes.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from headlong.layers.context import Context
from headlong.layers.decoder import DecoderLayer
from headlong.layers.streams import StreamLayer, collapse
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig
from headlong.ops import program
from headlong.ops.norm.normed import whole
from headlong.ops.program import RESULT, STREAM, Instruction
from headlong.state.layer_state import LayerState

States = Mapping[str, LayerState]
Layer = DecoderLayer | StreamLayer


class Stack(Protocol):
    width: int
    """The numbers that a pass gives for each token."""

    def begin(self, embedding_ND: Tensor) -> Tensor:
        """The residual before the first layer."""
        ...

    def run(self, x: Tensor, context: Context, states: States) -> Tensor:
        """Takes the residual through all layers. [N, width]"""
        ...

    def finish(self, tapped_NX: Tensor) -> Tensor:
        """What the lm_head takes of what `run` gives."""
        ...

    def remember(self, x: Tensor, context: Context, states: States) -> None:
        """Leaves behind what later tokens see of these in the one layer that there is, and computes nothing else."""
        ...

    def instructions(self) -> list[Instruction] | None:
        """`run` as instructions; None where there are none for it."""
        ...

    def remembering(self) -> list[Instruction]:
        """`remember` as instructions, where there are those of `run`."""
        ...


class PlainStack:
    """One residual stream, and a norm at its end. The norm is part of the pass: layers' epilogues begin what the next
    norm ends."""

    def __init__(self, layers: Sequence[DecoderLayer], config: ModelConfig, scope: Scope) -> None:
        self.layers, self.width = layers, config.hidden_size
        self.norm = scope.norm("norm", config.hidden_size, config.eps, centred=config.centred_norms)

    def begin(self, embedding_ND: Tensor) -> Tensor:
        return embedding_ND

    def run(self, x: Tensor, context: Context, states: States) -> Tensor:
        normed = self.layers[0].mixer_norm(x)
        norms = [layer.mixer_norm for layer in self.layers[1:]]
        for layer, then in zip(self.layers, [*norms, self.norm], strict=True):
            x, normed = layer(x, normed, context, states[layer.name], then)
        return whole(normed)

    def finish(self, tapped_NX: Tensor) -> Tensor:
        return tapped_NX

    def remember(self, x: Tensor, context: Context, states: States) -> None:
        (layer,) = self.layers
        layer.remember(layer.mixer_norm(x), context, states[layer.name])

    def instructions(self) -> list[Instruction] | None:
        instructions = [instruction for layer in self.layers for instruction in layer.instructions()]
        return [*instructions, program.Norm(self.norm, STREAM, RESULT)]

    def remembering(self) -> list[Instruction]:
        (layer,) = self.layers
        return layer.remembering()


class StreamStack:
    """Several residual streams, each of which begins as the embedding. A pass gives all of them side by side."""

    def __init__(self, layers: Sequence[StreamLayer], config: ModelConfig, scope: Scope) -> None:
        assert config.streams is not None
        self.layers, self.num_streams = layers, config.streams.num_streams
        self.width = self.num_streams * config.hidden_size
        self.collapse = collapse(config.streams, scope("hc_head"))
        self.norm = scope.norm("norm", config.hidden_size, config.eps, centred=config.centred_norms)

    def begin(self, embedding_ND: Tensor) -> Tensor:
        return embedding_ND[:, None].expand(-1, self.num_streams, -1)

    def run(self, x: Tensor, context: Context, states: States) -> Tensor:
        for layer in self.layers:
            x = layer(x, context, states[layer.name])
        return x.flatten(1)

    def finish(self, tapped_NX: Tensor) -> Tensor:
        return whole(self.norm(self.collapse(tapped_NX.unflatten(1, (self.num_streams, -1)))))

    def remember(self, x: Tensor, context: Context, states: States) -> None:
        (layer,) = self.layers
        layer.remember(x, context, states[layer.name])

    def instructions(self) -> list[Instruction] | None:
        return None

    def remembering(self) -> list[Instruction]:
        raise AssertionError("there are no instructions for several streams")


def stack(layers: Sequence[Layer], config: ModelConfig, scope: Scope) -> Stack:
    """The stack of these layers; what is at its end lies in `scope`."""
    if config.streams is not None:
        return StreamStack([layer for layer in layers if isinstance(layer, StreamLayer)], config, scope)
    return PlainStack([layer for layer in layers if isinstance(layer, DecoderLayer)], config, scope)
