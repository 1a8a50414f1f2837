"""The MTP head: one or more blocks of its target's family, each behind a join of two inputs.

    x = join(norm_e(E[t+1]), norm_h(h))   h is the target's hidden state, or what a pass of the head said
    out = norm(layer(x))                  what the next draft recycles in place of h

Where there are several residual streams, h and out are all of them before they are collapsed: the embedding is joined
with each, and a collapse and a norm of the head's own make of out what the lm_head takes.

Pair (h_i, t_{i+1}) stands at position i and predicts t_{i+2}. How the two are joined, and in which order, is data
(`HeadSpec`). Embedding and lm_head are the target's and come in as arguments, so the head can be built, moved or left
out on its own.

**Several layers.** Draft d is layer d's, modulo their number, and each layer has keys and values of its own. All layers
see the same pairs at the same positions: every pair leaves keys and values in each, and one layer says what comes next.
So what is kept depends on the pairs alone, whichever layer read them, and rollback, preemption and the prefix cache
treat any number of layers like one. A deeper layer's past is then not quite that of its training (DeepSeek-V3): there,
layer k reads the output of layer k - 1 where here it reads the target's hidden state at the position of the same token,
which that output foretells. Tokens cannot change by it, since the target decides; how many drafts stand may.
"""

import torch
from torch import Tensor

from headlong.errors import HeadError
from headlong.layers.context import Context
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig
from headlong.models.decoder import LayerFactory
from headlong.models.head_spec import HeadSpec
from headlong.models.stack import States, stack
from headlong.ops import program
from headlong.ops.linear.linear import Shard
from headlong.ops.norm.normed import whole
from headlong.ops.program import FIRST, GIVEN, STREAM, Instruction
from headlong.state.specs import LayerSpec


class Join:
    """Two inputs of the hidden size, each normed, to one; or an embedding and several streams, joined with each."""

    def __init__(self, config: ModelConfig, spec: HeadSpec, scope: Scope) -> None:
        size, eps, centred = config.hidden_size, config.eps, config.centred_norms
        self.spec = spec
        self.embedding_norm = scope.norm("pre_fc_norm_embedding", size, eps, centred=centred, inside=True)
        self.hidden_norm = scope.norm("pre_fc_norm_hidden", size, eps, centred=centred, inside=True)
        # GGUF has the two matrices of a sum side by side.
        self.is_one = spec.join == "concat" or scope.has("fc.weight")
        if self.is_one:
            self.parts = [scope.linear("fc", size, 2 * size, shard=Shard.NONE)]
        else:
            names = ("fc_embedding", "fc_hidden")
            self.parts = [scope.linear(name, size, size, shard=Shard.NONE) for name in names]

    def __call__(self, embedding_ND: Tensor, hidden_ND: Tensor) -> Tensor:
        """Returns [N, D], or [N, streams, D] where the hidden states are streams."""
        if self.spec.tap == "streams":
            return self._each_stream(embedding_ND, hidden_ND)
        pair = [self.embedding_norm(embedding_ND), self.hidden_norm(hidden_ND)]
        if not self.is_one:
            embedding_part, hidden_part = (
                part(normed) for part, normed in zip(self.parts, pair, strict=True)
            )
            return (embedding_part + hidden_part).to(hidden_ND.dtype)
        if self.spec.order == "hidden_first":
            pair.reverse()
        return self.parts[0](torch.cat(pair, dim=-1)).to(hidden_ND.dtype)

    def _each_stream(self, embedding_ND: Tensor, hidden_NX: Tensor) -> Tensor:
        token_ND = self.embedding_norm(embedding_ND)
        streams = self.hidden_norm(hidden_NX.reshape(-1, embedding_ND.shape[1]))
        if self.is_one:
            (fc,) = self.parts
            count = len(streams) // len(embedding_ND)
            pairs = torch.cat([whole(token_ND).repeat_interleave(count, 0), whole(streams)], dim=-1)
            return fc(pairs).view(len(embedding_ND), count, -1).to(hidden_NX.dtype)
        embedding_part, hidden_part = self.parts
        token_ND, streams = embedding_part(token_ND), whole(hidden_part(streams))
        joined = streams.view(len(embedding_ND), -1, token_ND.shape[1]) + token_ND[:, None]
        return joined.to(hidden_NX.dtype)

    def instructions(self) -> list[Instruction]:
        """The join as instructions: the embedding comes in the stream, the hidden state is given, and the stream gets
        both joined."""
        if not self.is_one:
            embedding_part, hidden_part = self.parts
            return [
                program.Norm(self.embedding_norm, STREAM, FIRST),
                program.Gemm(embedding_part, FIRST, STREAM),
                program.Norm(self.hidden_norm, GIVEN, FIRST),
                program.Gemm(hidden_part, FIRST, STREAM, add=True),
            ]
        (fc,) = self.parts
        size, hidden_first = fc.out_features, self.spec.order == "hidden_first"
        columns = (size, 0) if hidden_first else (0, size)
        return [
            program.Norm(self.embedding_norm, STREAM, FIRST, column=columns[0], stride=2 * size),
            program.Norm(self.hidden_norm, GIVEN, FIRST, column=columns[1], stride=2 * size),
            program.Gemm(fc, FIRST, STREAM),
        ]


class MtpLayer:
    """One layer of a head: a join, a block with keys and values of its own, a norm."""

    def __init__(
        self, config: ModelConfig, layer: LayerFactory, join: Join, joined: Scope, scope: Scope
    ) -> None:
        """`joined` is where the norm lies, beside the join's tensors; `scope` is the block's."""
        self.join = join
        self.layer = layer(config, None, scope)
        self.stack = stack([self.layer], config, joined)
        self.forward_program = self.remember_program = None
        if (instructions := self.stack.instructions()) is not None:
            joining, ops = join.instructions(), scope.ops
            self.forward_program = ops.compile([*joining, *instructions])
            self.remember_program = ops.compile([*joining, *self.stack.remembering()])

    def forward(self, embedding_ND: Tensor, hidden_ND: Tensor, context: Context, states: States) -> Tensor:
        if self.forward_program is not None:
            return self.forward_program(embedding_ND, context.attention, context.angles, states, hidden_ND)
        return self.stack.run(self.join(embedding_ND, hidden_ND), context, states)

    def remember(self, embedding_ND: Tensor, hidden_ND: Tensor, context: Context, states: States) -> None:
        """Leaves the pairs' keys and values behind, all that later pairs see of them."""
        if self.remember_program is not None:
            self.remember_program(embedding_ND, context.attention, context.angles, states, hidden_ND)
            return
        self.stack.remember(self.join(embedding_ND, hidden_ND), context, states)


class MtpHead:
    """The layers of a head, one after the other for further drafts."""

    def __init__(
        self, config: ModelConfig, layer: LayerFactory, scope: Scope, spec: HeadSpec, num_layers: int = 1
    ) -> None:
        """`scope` is that of the head's own tensors, `mtp.`"""
        if spec.refusal is not None:
            raise HeadError(f"the MTP head of {config.model_type} cannot be used: {spec.refusal}")
        shared = None if spec.joins_in_layers else Join(config, spec, scope)
        self.layers: list[MtpLayer] = []
        for number in range(num_layers):
            own = scope(f"layers.{number}")
            if shared is None:
                self.layers.append(MtpLayer(config, layer, Join(config, spec, own), own, own))
            else:
                self.layers.append(MtpLayer(config, layer, shared, scope, own))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_one_call(self) -> bool:
        """Whether a pass is one call of native code for each layer."""
        return all(layer.forward_program is not None for layer in self.layers)

    @property
    def state_specs(self) -> dict[str, LayerSpec]:
        return {own.layer.name: own.layer.state_spec for own in self.layers}

    def forward(
        self, embedding_ND: Tensor, hidden_ND: Tensor, context: Context, states: States, depth: int = 0
    ) -> Tensor:
        """What the layer for drafts at `depth` says of these pairs, which all layers remember."""
        speaker = self.layers[depth % len(self.layers)]
        for layer in self.layers:
            if layer is not speaker:  # a program computes in the embedding's place
                layer.remember(embedding_ND.clone(), hidden_ND, context, states)
        return speaker.forward(embedding_ND, hidden_ND, context, states)

    def finish(self, out_NX: Tensor, depth: int = 0) -> Tensor:
        """What the lm_head takes of the output of the layer for drafts at `depth`."""
        return self.layers[depth % len(self.layers)].stack.finish(out_NX)

    def remember(self, embedding_ND: Tensor, hidden_ND: Tensor, context: Context, states: States) -> None:
        """Leaves the pairs' keys and values behind, all that later pairs see of them."""
        for layer in self.layers[1:]:
            layer.remember(embedding_ND.clone(), hidden_ND, context, states)
        self.layers[0].remember(embedding_ND, hidden_ND, context, states)
