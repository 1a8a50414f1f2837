"""A decoder layer between several residual streams: hyper-connections lead into its halves and back."""

from torch import Tensor

from headlong.layers.compressed_attention import CompressedAttention
from headlong.layers.context import Context
from headlong.layers.mlp import MoeMlp
from headlong.layers.weights import Scope
from headlong.ops.hyper_connection.weights import HyperWeights, StreamSizes
from headlong.ops.interfaces import Collapse, HyperConnection
from headlong.state.layer_state import LayerState
from headlong.state.specs import LayerSpec


class StreamLayer:
    """`name` is the layer's key in the state."""

    def __init__(
        self, name: str, mixer: CompressedAttention, mlp: MoeMlp, sizes: StreamSizes, scope: Scope, eps: float
    ) -> None:
        self.name = name
        self.mixer, self.mlp = mixer, mlp
        self.around_mixer = _connection(sizes, scope("attn_hc"))
        self.around_mlp = _connection(sizes, scope("ffn_hc"))
        size = sizes.hidden_size
        self.mixer_norm = scope.norm("input_layernorm", size, eps, centred=False, inside=True)
        self.mlp_norm = scope.norm("post_attention_layernorm", size, eps, centred=False, inside=True)

    @property
    def state_spec(self) -> LayerSpec:
        return self.mixer.state_spec

    def __call__(self, x_NSD: Tensor, context: Context, state: LayerState) -> Tensor:
        """The streams after the layer."""
        normed, mix = self.around_mixer(x_NSD, self.mixer_norm)
        x_NSD = self.around_mixer.add(x_NSD, self.mixer(normed, context, state), mix)
        normed, mix = self.around_mlp(x_NSD, self.mlp_norm)
        return self.around_mlp.add(x_NSD, self.mlp.output(normed, x_NSD[:, 0], context.tokens_N), mix)

    def remember(self, x_NSD: Tensor, context: Context, state: LayerState) -> None:
        """Leaves behind what later tokens see of these, and computes nothing else."""
        normed, _ = self.around_mixer(x_NSD, self.mixer_norm)
        self.mixer.remember(normed, context, state)


def collapse(sizes: StreamSizes, scope: Scope) -> Collapse:
    """What makes one hidden state of all streams."""
    count, inputs = sizes.num_streams, sizes.num_streams * sizes.hidden_size
    fn_SX = scope.vector("hc_fn", count, inputs)
    weights = HyperWeights(sizes, fn_SX, scope.vector("hc_base", count), scope.vector("hc_scale", 1))
    return scope.ops.collapse(weights)


def _connection(sizes: StreamSizes, scope: Scope) -> HyperConnection:
    count = sizes.num_streams
    num_mixes = (2 + count) * count
    fn_MX = scope.vector("fn", num_mixes, count * sizes.hidden_size)
    weights = HyperWeights(sizes, fn_MX, scope.vector("base", num_mixes), scope.vector("scale", 3))
    return scope.ops.hyper_connection(weights)
