"""Embedding, lm_head and rotary frequencies: what a model and its MTP head both use.

What lies between the embedding and the lm_head is the model's business, or the head's. A head on another device than
its target has embeddings of its own, read from the same tensors.
"""

from functools import partial

from torch import Tensor

from headlong.errors import CheckpointError
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig
from headlong.ops.linear.linear import Shard
from headlong.ops.rope.reference import Rotary, frequencies_of

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, which a GGUF file holds where others say in the config how to compute them."""


class Embeddings:
    """Embedding and lm_head, with the ops they are made of, and the rotations of their positions."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        self.config = config
        self.ops = scope.ops
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = scope.embedding("embed_tokens", vocab, hidden, shard=Shard.OUTPUT)
        # A stored lm_head wins over a config that calls it tied.
        if not config.tied or scope.has("lm_head.weight"):
            self.lm_head = scope.linear("lm_head", vocab, hidden, shard=Shard.OUTPUT)
        else:
            self.lm_head = self.embedding.lm_head(partial(scope.ops.linear, shard=Shard.OUTPUT))
        self.rotary = _rotary(config, scope)

    @property
    def capturable(self) -> bool:
        """Whether what is computed with them can be a CUDA graph."""
        return False

    def embed(self, tokens_N: Tensor) -> Tensor:
        return self.embedding(tokens_N)


def frequencies(config: ModelConfig) -> list[Tensor]:
    """The rotary frequencies by the config: those of the one base, or of both."""
    bases = [(config.rope_theta, config.rope_scaling)]
    if config.second_rope is not None:
        bases.append((config.second_rope.theta, config.second_rope.scaling))
    return [
        frequencies_of(
            theta, config.rotary_dim, None if scaling is None else scaling.factors(theta, config.rotary_dim)
        )
        for theta, scaling in bases
    ]


def _rotary(config: ModelConfig, scope: Scope) -> Rotary:
    """Stored factors win over a scaling in the config: they are what it would compute."""
    theta, rotary_dim = config.rope_theta, config.rotary_dim
    if config.second_rope is not None:
        first, second = frequencies(config)
        return Rotary.beside([first, second], scope.ops.device)
    factors = None
    if scope.has(ROPE_FACTORS):
        factors = scope.vector(ROPE_FACTORS, rotary_dim // 2)
        if not factors.is_meta and not bool((factors.isfinite() & (factors > 0)).all()):
            raise CheckpointError(
                f"tensor {ROPE_FACTORS!r} must hold positive numbers; the file is damaged, fetch it again"
            )
    elif config.rope_scaling is not None:
        factors = config.rope_scaling.factors(theta, rotary_dim)
    head_dim, sections = config.attention.head_dim, config.rope_sections
    amplitude = 1.0 if config.rope_scaling is None else config.rope_scaling.amplitude
    return Rotary.of(theta, rotary_dim, head_dim, scope.ops.device, factors, sections, amplitude)
