"""What families with experts share: their fields in config.json, in the two spellings that there are, their keys in
GGUF, and the half of a layer that is experts or, in some layers, a dense MLP."""

from typing import Any

from headlong.checkpoint.gguf_config import Keys
from headlong.errors import CheckpointError, ConfigError
from headlong.layers.mlp import Mlp, MoeConfig, MoeMlp
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig
from headlong.models.fields import Fields
from headlong.ops.moe.routing import Routing

MAX_EXPERTS = 1 << 14
COUNT_ANEW = "num_local_experts"
"""What configs that transformers has written anew call the number of experts."""
SOFTMAX, SIGMOID = 1, 2
"""The numbers that GGUF has for scores."""


def feed_forward(config: ModelConfig, index: int | None, scope: Scope) -> Mlp | MoeMlp:
    """The second half of the layer at an index, or of the head's block, which is never the dense one of a model with
    experts."""
    if config.moe is None or index in config.dense_layers:
        return Mlp.load(config.hidden_size, config.intermediate_size, scope("mlp"), bias=config.mlp_bias)
    return MoeMlp(config.moe, scope("mlp"))


def softmax_experts(f: Fields, *, normalise: bool, shared: bool) -> MoeConfig:
    """Reads the fields that Qwen's families have; a `shared` expert stands behind a gate."""
    count, active = expert_counts(f, "num_experts")
    return MoeConfig(
        hidden_size=f.int("hidden_size"),
        routing=Routing(count, active, normalise),
        intermediate_size=f.int("moe_intermediate_size"),
        shared_intermediate_size=f.int("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
    )


def layers_without_experts(f: Fields, count: int) -> frozenset[int]:
    """The dense ones of so many layers, as Qwen's families spell them."""
    only = f.data.get("mlp_only_layers") or []
    step = f.int("decoder_sparse_step", 1)
    if not isinstance(only, list) or not all(isinstance(i, int) for i in only):
        raise ConfigError(f"{f.where}: mlp_only_layers must be a list of layer numbers, not {only!r}")
    return frozenset(i for i in range(count) if i in only or (i + 1) % step)


def biased_experts(f: Fields) -> MoeConfig:
    """Reads the fields of DeepSeek-V3, and of who came after it: a bias for the choice, groups, shared experts without
    a gate."""
    count, active = expert_counts(f, "n_routed_experts")
    scores, method = f.data.get("scoring_func", "sigmoid"), f.data.get("topk_method", "noaux_tc")
    if scores not in ("sigmoid", "softmax"):
        raise ConfigError(
            f"{f.where}: scoring_func {scores!r} is not supported, only 'sigmoid' and 'softmax'"
        )
    if method != "noaux_tc":
        raise ConfigError(f"{f.where}: topk_method {method!r} is not supported, only 'noaux_tc'")
    groups = f.int("n_group", 1)
    kept, size = f.int("topk_group", groups), count // groups
    if count % groups or kept > groups or (kept < groups and size < 2):
        raise ConfigError(
            f"{f.where}: n_group ({groups}) must divide n_routed_experts ({count}) into groups of at least two, "
            f"of which topk_group ({kept}) are kept"
        )
    if active > kept * size:
        raise ConfigError(
            f"{f.where}: num_experts_per_tok ({active}) is above the {kept * size} experts of "
            f"topk_group ({kept}) groups"
        )
    inner = f.int("moe_intermediate_size")
    return MoeConfig(
        hidden_size=f.int("hidden_size"),
        routing=Routing(
            count,
            active,
            f.bool("norm_topk_prob", True),
            scores,
            scale=f.float("routed_scaling_factor", 1.0, low=0.0, high=1e6),
            num_groups=groups,
            kept_groups=kept,
        ),
        intermediate_size=inner,
        shared_intermediate_size=inner * f.int("n_shared_experts", 0, low=0, high=1 << 10),
        has_bias=True,
    )


def first_dense_layers(f: Fields, count: int) -> frozenset[int]:
    """The dense ones of so many layers, as DeepSeek-V3 spells them."""
    first, step = f.int("first_k_dense_replace", 0, low=0), f.int("moe_layer_freq", 1)
    return frozenset(i for i in range(count) if i < first or i % step)


def expert_counts(f: Fields, name: str) -> tuple[int, int]:
    """How many experts there are, and how many of them a token has."""
    name = COUNT_ANEW if name not in f.data and COUNT_ANEW in f.data else name
    count, active = f.int(name, high=MAX_EXPERTS), f.int("num_experts_per_tok")
    if active > count:
        raise ConfigError(f"{f.where}: num_experts_per_tok ({active}) is above {name} ({count})")
    return count, active


def softmax_fields(keys: Keys) -> dict[str, Any]:
    """What config.json would say in Qwen's spelling, from a GGUF file's keys."""
    count = keys.int("expert_count", high=MAX_EXPERTS)
    return {
        "num_experts": count,
        "num_experts_per_tok": keys.int("expert_used_count", high=count),
        "moe_intermediate_size": keys.int("expert_feed_forward_length"),
    }


def biased_fields(keys: Keys) -> dict[str, Any]:
    """What config.json would say in DeepSeek-V3's spelling, from a GGUF file's keys."""
    count = keys.int("expert_count", high=MAX_EXPERTS)
    scores = keys.int("expert_gating_func", SIGMOID)
    if scores not in (SOFTMAX, SIGMOID):
        raise keys.fault("expert_gating_func", f"must be {SOFTMAX} or {SIGMOID}, not {scores}")
    groups = keys.int("expert_group_count", 1, high=count)
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": keys.int("expert_used_count", high=count),
        "moe_intermediate_size": keys.int("expert_feed_forward_length"),
        "n_shared_experts": keys.int("expert_shared_count", 0, low=0),
        "first_k_dense_replace": keys.int("leading_dense_block_count", 0, low=0),
        "scoring_func": "softmax" if scores == SOFTMAX else "sigmoid",
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.float("expert_weights_scale", 1.0, high=1e6),
        "n_group": groups,
        "topk_group": keys.int("expert_group_used_count", groups, high=groups),
    }


def expert_keys(config: ModelConfig) -> dict[str, Any]:
    """The inverse: the keys of a GGUF file that all architectures with experts share."""
    moe = config.moe
    assert moe is not None
    return {
        "expert_count": moe.num_experts,
        "expert_used_count": moe.num_active,
        "expert_feed_forward_length": moe.intermediate_size,
    }


def biased_keys(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `biased_fields`."""
    moe, dense = config.moe, config.dense_layers
    assert moe is not None
    if dense != frozenset(range(len(dense))):
        raise CheckpointError(
            "config.json: moe_layer_freq: GGUF can say that the first layers are dense, no others"
        )
    routing = moe.routing
    keys = expert_keys(config) | {
        "feed_forward_length": config.intermediate_size,
        "expert_shared_count": moe.shared_intermediate_size // moe.intermediate_size,
        "leading_dense_block_count": len(dense),
        "expert_gating_func": SOFTMAX if routing.scores == "softmax" else SIGMOID,
        "expert_weights_norm": routing.normalise,
        "expert_weights_scale": routing.scale,
    }
    if routing.num_groups > 1:
        keys |= {"expert_group_count": routing.num_groups, "expert_group_used_count": routing.kept_groups}
    return keys
