"""The few numbers a model is built from, whatever its family: what a config.json is read into. Reads nothing itself."""

from dataclasses import dataclass

from headlong.layers.attention import AttentionConfig
from headlong.layers.compressed_attention import CompressedAttentionConfig, Compression
from headlong.layers.delta_net import DeltaNetConfig
from headlong.layers.latent_attention import LatentAttentionConfig
from headlong.layers.mlp import MoeConfig
from headlong.ops.hyper_connection.weights import StreamSizes
from headlong.ops.rope.scaling import RopeScaling

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MAX_LAYERS = 4096


@dataclass(frozen=True)
class SecondRope:
    """A second base for some layers, which turns as many numbers of a head as the first."""

    theta: float
    scaling: RopeScaling | None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. `delta_net` is None where all layers are attention, `moe` in dense models; `dense_layers`
    have a plain MLP all the same. `centred_norms` are stored as w where 1 + w is meant."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    eps: float
    max_position: int
    tied: bool
    rope_theta: float
    rotary_dim: int
    rope_scaling: RopeScaling | None
    attention: AttentionConfig
    eos_token_ids: tuple[int, ...]
    rope_sections: tuple[int, ...] = ()
    """How many rotary frequencies each of a token's positions turns, where it may stand at several at once."""
    delta_net: DeltaNetConfig | None = None
    latent: LatentAttentionConfig | None = None
    """The attention of models that keep latents; of `attention` only heads and their rotary part then count."""
    moe: MoeConfig | None = None
    dense_layers: frozenset[int] = frozenset()
    window: int | None = None
    """How many positions a token attends to in sliding layers, its own the last of them; None without such layers."""
    second_rope: SecondRope | None = None
    compressed: CompressedAttentionConfig | None = None
    """The attention of models that keep a window and compressed entries; of `attention` only heads and their rotary
    part then count."""
    compressions: tuple[Compression | None, ...] = ()
    """How each layer of such a model makes entries; None for one that has none."""
    streams: StreamSizes | None = None
    """The residual streams, where there are several."""
    hashed_layers: frozenset[int] = frozenset()
    """Layers whose experts a table lists for each token of the vocabulary."""
    mlp_bias: bool = False
    centred_norms: bool = True
