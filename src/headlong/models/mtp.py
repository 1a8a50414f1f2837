"""The MTP head, one block of its target's family.

    x = fc([norm_e(E[t+1]), norm_h(h)])   embedding first; h is the target's hidden after its final norm
    out = norm(layer(x))                  what the next draft recycles in place of h

Pair (h_i, t_{i+1}) stands at position i and predicts t_{i+2}. Embedding and lm_head are the target's and come
in as arguments, so the head can be built, moved or left out on its own.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig
from headlong.models.decoder import LayerFactory
from headlong.ops import program
from headlong.ops.linear.linear import Shard
from headlong.ops.norm.normed import Normed, whole
from headlong.ops.program import FIRST, GIVEN, RESULT, STREAM, Instruction
from headlong.state.layer_state import LayerState
from headlong.state.specs import LayerSpec


class MtpHead:
    """One full-attention layer with keys and values of its own, used again for every further draft."""

    def __init__(self, config: ModelConfig, layer: LayerFactory, scope: Scope) -> None:
        """`scope` is that of the head's own tensors, `mtp.`"""
        hidden, eps, centred = config.hidden_size, config.eps, config.centred_norms
        self.embedding_norm = scope.norm("pre_fc_norm_embedding", hidden, eps, centred=centred, inside=True)
        self.hidden_norm = scope.norm("pre_fc_norm_hidden", hidden, eps, centred=centred, inside=True)
        self.fc = scope.linear("fc", hidden, 2 * hidden, shard=Shard.NONE)
        self.layer = layer(config, None, scope("layers.0"))
        self.norm = scope.norm("norm", hidden, eps, centred=centred)
        self.forward_program = scope.ops.compile(
            [*self._joining(), *self.layer.instructions(), program.Norm(self.norm, STREAM, RESULT)]
        )
        self.remember_program = scope.ops.compile([*self._joining(), *self.layer.remembering()])

    @property
    def state_specs(self) -> dict[str, LayerSpec]:
        return {self.layer.name: self.layer.state_spec}

    def forward(
        self, embedding_ND: Tensor, hidden_ND: Tensor, context: Context, states: Mapping[str, LayerState]
    ) -> Tensor:
        if self.forward_program is not None:
            return self.forward_program(embedding_ND, context.attention, context.angles, states, hidden_ND)
        x_ND, normed = self._joined(embedding_ND, hidden_ND)
        return whole(self.layer(x_ND, normed, context, states[self.layer.name], self.norm)[1])

    def remember(
        self, embedding_ND: Tensor, hidden_ND: Tensor, context: Context, states: Mapping[str, LayerState]
    ) -> None:
        """Leaves the pairs' keys and values behind, all that later pairs see of them."""
        if self.remember_program is not None:
            self.remember_program(embedding_ND, context.attention, context.angles, states, hidden_ND)
            return
        normed = self._joined(embedding_ND, hidden_ND)[1]
        self.layer.remember(normed, context, states[self.layer.name])

    def _joined(self, embedding_ND: Tensor, hidden_ND: Tensor) -> tuple[Tensor, Normed]:
        """What the layer is given, and what its first norm makes of that."""
        pair = (self.embedding_norm(embedding_ND), self.hidden_norm(hidden_ND))
        x_ND = self.fc(torch.cat(pair, dim=-1)).to(hidden_ND.dtype)
        return x_ND, self.layer.mixer_norm(x_ND)

    def _joining(self) -> list[Instruction]:
        """What the layer is given, into the stream, which holds the embedding; the hidden state is given."""
        size = self.fc.out_features
        return [
            program.Norm(self.embedding_norm, STREAM, FIRST, column=0, stride=2 * size),
            program.Norm(self.hidden_norm, GIVEN, FIRST, column=size, stride=2 * size),
            program.Gemm(self.fc, FIRST, STREAM),
        ]
