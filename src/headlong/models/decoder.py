"""What all families share: an embedding, decoder layers one after the other, a final norm and an lm_head.

A family brings its layers; the MTP head is in mtp.py. Knows names and wiring, no checkpoints and no schedules.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from headlong.layers.context import Context
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig
from headlong.models.embeddings import Embeddings
from headlong.models.stack import Layer, stack
from headlong.state.layer_state import LayerState
from headlong.state.specs import LayerSpec

LayerFactory = Callable[[ModelConfig, int | None, Scope], Layer]
"""Makes layer number i of a family, or, where the number is None, the block of its MTP head."""


class DecoderModel(Embeddings):
    """Tokens to hidden states as an MTP head taps them, and those to logits."""

    def __init__(self, config: ModelConfig, layer: LayerFactory, scope: Scope) -> None:
        super().__init__(config, scope)
        self.layers = [layer(config, i, scope(f"layers.{i}")) for i in range(len(config.layer_types))]
        self.stack = stack(self.layers, config, scope)
        instructions = self.stack.instructions()
        self.program = None if instructions is None else scope.ops.compile(instructions)
        """All layers and what comes after them in one call, where the backend has one."""

    @property
    def state_specs(self) -> dict[str, LayerSpec]:
        return {layer.name: layer.state_spec for layer in self.layers}

    @property
    def asks_host(self) -> bool:
        """Whether a pass asks the host for anything while it runs."""
        return self.ops.asks_host or self.embedding.asks_host

    @property
    def capturable(self) -> bool:
        """Whether a pass can be captured as a CUDA graph."""
        return self.ops.can_capture and not self.asks_host

    @property
    def tap_width(self) -> int:
        """The numbers of a hidden state as a head taps it."""
        return self.stack.width

    def forward(self, tokens_N: Tensor, context: Context, states: Mapping[str, LayerState]) -> Tensor:
        """Hidden states [N, tap_width]."""
        x_ND = self.embed(tokens_N)
        if self.program is not None:
            return self.program(x_ND, context.attention, context.angles, states)
        return self.stack.run(self.stack.begin(x_ND), replace(context, tokens_N=tokens_N), states)

    def finish(self, tapped_NX: Tensor) -> Tensor:
        """Hidden states after the final norm, of those that `forward` gives."""
        return self.stack.finish(tapped_NX)

    def logits(self, tapped_NX: Tensor) -> Tensor:
        """Logits of hidden states that `forward` gives."""
        return self.lm_head(self.finish(tapped_NX))
