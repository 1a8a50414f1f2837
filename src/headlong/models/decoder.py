"""What all families share: an embedding, decoder layers one after the other, a final norm and an lm_head.

A family brings its layers; the MTP head is in mtp.py. Knows names and wiring, no checkpoints and no schedules.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from headlong.layers.context import Context
from headlong.layers.decoder import DecoderLayer
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig
from headlong.models.embeddings import Embeddings
from headlong.ops import program
from headlong.ops.norm.normed import whole
from headlong.ops.program import RESULT, STREAM
from headlong.state.layer_state import LayerState
from headlong.state.specs import LayerSpec

LayerFactory = Callable[[ModelConfig, int | None, Scope], DecoderLayer]
"""Makes layer number i of a family, or, where the number is None, the block of its MTP head."""


class DecoderModel(Embeddings):
    """Tokens to hidden states after the final norm, and those to logits."""

    def __init__(self, config: ModelConfig, layer: LayerFactory, scope: Scope) -> None:
        super().__init__(config, scope)
        self.layers = [layer(config, i, scope(f"layers.{i}")) for i in range(len(config.layer_types))]
        self.norm = scope.norm("norm", config.hidden_size, config.eps, centred=config.centred_norms)
        instructions = [instruction for layer in self.layers for instruction in layer.instructions()]
        self.program = scope.ops.compile([*instructions, program.Norm(self.norm, STREAM, RESULT)])
        """All layers and the last norm in one call, where the backend has one."""

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

    def forward(self, tokens_N: Tensor, context: Context, states: Mapping[str, LayerState]) -> Tensor:
        x_ND = self.embed(tokens_N)
        if self.program is not None:
            return self.program(x_ND, context.attention, context.angles, states)
        normed = self.layers[0].mixer_norm(x_ND)
        norms = [layer.mixer_norm for layer in self.layers[1:]]
        for layer, then in zip(self.layers, [*norms, self.norm], strict=True):
            x_ND, normed = layer(x_ND, normed, context, states[layer.name], then)
        return whole(normed)
