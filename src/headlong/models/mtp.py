"""The MTP head of the Qwen3.5 family.

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
from headlong.models.config import FULL, ModelConfig
from headlong.models.qwen3_5 import decoder_layer
from headlong.state.layer import LayerState
from headlong.state.specs import LayerSpec


class MtpHead:
    """One full-attention layer with keys and values of its own, used again for every further draft."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        """`scope` is that of the head's own tensors, `mtp.`"""
        hidden = config.hidden_size
        self.embedding_norm = scope.norm("pre_fc_norm_embedding", hidden, config.eps)
        self.hidden_norm = scope.norm("pre_fc_norm_hidden", hidden, config.eps)
        self.fc = scope.linear("fc", hidden, 2 * hidden)
        self.layer = decoder_layer(config, FULL, scope("layers.0"), dense=False)
        self.norm = scope.norm("norm", hidden, config.eps, wide=True)

    @property
    def state_specs(self) -> dict[str, LayerSpec]:
        return {self.layer.name: self.layer.state_spec}

    def forward(
        self, embedding_ND: Tensor, hidden_ND: Tensor, context: Context, states: Mapping[str, LayerState]
    ) -> Tensor:
        pair = (self.embedding_norm(embedding_ND), self.hidden_norm(hidden_ND))
        x_ND = self.fc(torch.cat(pair, dim=-1)).to(hidden_ND.dtype)
        return self.norm(self.layer(x_ND, context, states[self.layer.name]))
