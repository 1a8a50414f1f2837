"""One decoder layer: a mixer over time, then a feed-forward, each on a normed residual."""

from torch import Tensor

from headlong.layers.attention import Attention
from headlong.layers.context import Context
from headlong.layers.delta_net import GatedDeltaNet
from headlong.layers.latent_attention import LatentAttention
from headlong.layers.mlp import Mlp, MoeMlp
from headlong.layers.weights import Scope
from headlong.ops import program
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.program import FIRST, STREAM, Instruction
from headlong.state.layer_state import LayerState
from headlong.state.specs import LayerSpec


class DecoderLayer:
    """`name` is the layer's key in the state."""

    def __init__(
        self,
        name: str,
        mixer: Attention | LatentAttention | GatedDeltaNet,
        mlp: Mlp | MoeMlp,
        scope: Scope,
        hidden_size: int,
        eps: float,
        *,
        centred: bool,
    ) -> None:
        """`centred` norms are stored as w where 1 + w is meant."""
        self.name = name
        self.mixer = mixer
        self.mlp = mlp
        self.mixer_norm = scope.norm("input_layernorm", hidden_size, eps, centred=centred, inside=True)
        self.mlp_norm = scope.norm("post_attention_layernorm", hidden_size, eps, centred=centred, inside=True)

    @property
    def state_spec(self) -> LayerSpec:
        return self.mixer.state_spec

    def __call__(
        self, x_ND: Tensor, normed: Normed, context: Context, state: LayerState, then: Norm
    ) -> tuple[Tensor, Normed]:
        """`normed` is what its first norm made of `x_ND`, and `then` the norm that comes next."""
        x_ND, normed = self.mixer(normed, context, state, x_ND, self.mlp_norm)
        return self.mlp.add_to(normed, x_ND, then)

    def instructions(self) -> list[Instruction]:
        """The instructions of this layer, from the residual stream to the residual stream."""
        return [
            program.Norm(self.mixer_norm, STREAM, FIRST),
            *self.mixer.instructions(self.name),
            program.Norm(self.mlp_norm, STREAM, FIRST),
            *self.mlp.instructions(),
        ]

    def remember(self, normed: Normed, context: Context, state: LayerState) -> None:
        """Leaves behind what later tokens see of these, and computes nothing else."""
        self._attention.remember(normed, context, state)

    def remembering(self) -> list[Instruction]:
        """`remember` as instructions; what the layer is given is in the stream."""
        return [program.Norm(self.mixer_norm, STREAM, FIRST), *self._attention.remembering(self.name)]

    @property
    def _attention(self) -> Attention | LatentAttention:
        assert not isinstance(self.mixer, GatedDeltaNet), "nothing can be left out of a recurrence"
        return self.mixer
