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
from headlong.ops.embedding.reference import Embedding
from headlong.ops.norm.native import NativeRmsNorm
from headlong.ops.program import RESULT, STREAM, Program
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
        self.program = self._record()

    @property
    def state_specs(self) -> dict[str, LayerSpec]:
        return {layer.name: layer.state_spec for layer in self.layers}

    @property
    def launches_alone(self) -> bool:
        """Whether a pass never asks the host for anything: all of it is Triton's. Which rows of a packed embedding are
        wanted may be asked there."""
        plain = isinstance(self.embedding, Embedding) and isinstance(self.embedding.weight, Tensor)
        return self.ops.all_triton and plain

    @property
    def capturable(self) -> bool:
        """Whether it can be a CUDA graph."""
        return self.launches_alone and self.ops.device.type == "cuda"

    def forward(self, tokens_N: Tensor, context: Context, states: Mapping[str, LayerState]) -> Tensor:
        x_ND = self.embed(tokens_N)
        if self.program is not None:
            size = self.config.hidden_size
            return self.program(x_ND, context.attention, context.angles, states, result_size=size)
        normed = self.layers[0].mixer_norm(x_ND)
        norms = [layer.mixer_norm for layer in self.layers[1:]]
        for layer, then in zip(self.layers, [*norms, self.norm], strict=True):
            x_ND, normed = layer(x_ND, normed, context, states[layer.name], then)
        return normed

    def _record(self) -> Program | None:
        """All layers and the last norm in one call, where all of it is native."""
        if not isinstance(self.norm, NativeRmsNorm):
            return None
        program = Program()
        if not all(layer.record(program) for layer in self.layers):
            return None
        program.norm(self.norm, STREAM, RESULT)
        return program
