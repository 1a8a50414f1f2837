"""DeepSeek-V4: windows and compressed entries in place of all keys, four residual streams, and experts in every layer,
which the first layers look up by token. The MTP head reads and recycles the streams."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from headlong.checkpoint.names import Naming
from headlong.errors import ConfigError
from headlong.layers.compressed_attention import (
    CompressedAttention,
    CompressedAttentionConfig,
    Compression,
    IndexerConfig,
)
from headlong.layers.mlp import MoeConfig, MoeMlp
from headlong.layers.streams import StreamLayer
from headlong.layers.weights import Scope
from headlong.models import deepseek_v4_gguf
from headlong.models.config import FULL, MAX_LAYERS, ModelConfig, SecondRope
from headlong.models.config_fields import attention, decoder, without_nulls
from headlong.models.embeddings import frequencies
from headlong.models.experts import MAX_EXPERTS
from headlong.models.family import Family
from headlong.models.fields import Fields
from headlong.models.head_spec import HeadSpec
from headlong.models.rope_fields import rope
from headlong.ops.hyper_connection.weights import StreamSizes
from headlong.ops.moe.routing import Routing
from headlong.ops.rope.pairs import PairRope
from headlong.ops.silu_mul.activation import Activation

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {0: WINDOW, 4: SPARSE, 128: HEAVY}
"""The kinds of layers by how many tokens there are to an entry, as first releases write them."""
LONGEST = 1 << 20


class _Kind(NamedTuple):
    """How a kind of layer compresses: how many tokens there are to an entry, and to how many entries a token counts."""

    ratio: int
    num_series: int


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    f = Fields(without_nulls(config), "config.json")
    head_dim = f.int("head_dim", 512)
    main, compress = _ropes(f, _rope_dim(f, head_dim))
    count = f.int("num_hidden_layers", high=MAX_LAYERS)
    sizes = attention(main, f.int("qk_rope_head_dim", _rope_dim(f, head_dim)), 1, gated=False, normed=False)
    if f.int("num_key_value_heads", 1) != 1:
        raise ConfigError(f"{f.where}: num_key_value_heads must be 1: all heads share one key")
    if f.bool("attention_bias", False):
        raise ConfigError(f"{f.where}: attention_bias must be false: projections have no biases")
    read = decoder(
        main,
        sizes,
        rotary_part=1.0,
        max_position=LONGEST,
        model_type=str(config.get("model_type")),
        intermediate_size=f.int("moe_intermediate_size"),
        layer_types=(FULL,) * count,
        tied=f.bool("tie_word_embeddings", False),
        second_rope=_second(compress, sizes.head_dim),
        compressed=_compressed(f, head_dim),
        moe=_experts(f),
        streams=_streams(f),
        hashed_layers=_hashed_layers(f, count),
        centred_norms=False,
    )
    return replace(read, compressions=_compressions(f, count, frequencies(read)[1].tolist()))


def _rope_dim(f: Fields, head_dim: int) -> int:
    """The last numbers of a head, which positions turn."""
    part = f.float("partial_rotary_factor", 64 / 512, low=0.0, high=1.0)
    dim = f.int("qk_rope_head_dim", round(head_dim * part))
    if dim > head_dim or dim % 2:
        raise ConfigError(
            f"{f.where}: qk_rope_head_dim ({dim}) must be an even number up to head_dim ({head_dim})"
        )
    return dim


def _ropes(f: Fields, rope_dim: int) -> tuple[Fields, Fields]:
    """The fields as the layers with a window alone read them, and as those with entries do: they have a base of their
    own, and alone are scaled."""
    given = f.data.get("rope_parameters") or f.data.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{f.where}: rope_parameters must be an object, not {given!r}")
    nested = isinstance(given.get("main"), Mapping) and isinstance(given.get("compress"), Mapping)
    own = {"rope_theta": f.data.get("compress_rope_theta", 160000.0)}
    main, compress = (given["main"], given["compress"]) if nested else ({}, {**given, **own})
    if compress.get("rope_type", compress.get("type")) == "yarn":
        compress = {"attention_factor": 1.0, **compress}
    plain = {
        name: value
        for name, value in f.data.items()
        if name not in ("rope_parameters", "rope_scaling", "partial_rotary_factor")
    } | {"head_dim": rope_dim}
    return (
        Fields(plain | {"rope_parameters": _whole(main)}, f.where),
        Fields(plain | {"rope_parameters": _whole(compress)}, f.where),
    )


def _whole(rope_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """All of what is turned at all is turned."""
    return {name: value for name, value in rope_parameters.items() if name != "partial_rotary_factor"}


def _second(compress: Fields, rope_dim: int) -> SecondRope:
    longest = compress.int("max_position_embeddings", LONGEST, high=1 << 30)
    turned = rope(compress, rope_dim, 1.0, longest)
    return SecondRope(turned.theta, turned.scaling)


def _compressed(f: Fields, head_dim: int) -> CompressedAttentionConfig:
    heads, groups = f.int("num_attention_heads"), f.int("o_groups", 8)
    if heads % groups:
        raise ConfigError(f"{f.where}: o_groups ({groups}) must divide num_attention_heads ({heads})")
    return CompressedAttentionConfig(
        hidden_size=f.int("hidden_size"),
        num_heads=heads,
        head_dim=head_dim,
        query_rank=f.int("q_lora_rank", 1024),
        num_groups=groups,
        group_rank=f.int("o_lora_rank", 1024),
        window=f.int("sliding_window", 128, high=1 << 16),
        eps=f.float("rms_norm_eps", 1e-6, low=0.0, high=1.0),
    )


def _compressions(f: Fields, count: int, inv_freq: list[float]) -> tuple[Compression | None, ...]:
    """How each layer makes entries."""
    rates = f.data.get("compress_rates") or {}
    if not isinstance(rates, Mapping):
        raise ConfigError(f"{f.where}: compress_rates must be an object, not {rates!r}")
    rate = Fields(rates, f"{f.where}: compress_rates")
    kinds = {
        SPARSE: _Kind(rate.int(SPARSE, 4, high=4096), 2),
        HEAVY: _Kind(rate.int(HEAVY, 128, high=4096), 1),
    }
    indexer = IndexerConfig(
        f.int("index_n_heads", 64), f.int("index_head_dim", 128), f.int("index_topk", 512)
    )
    if indexer.head_dim < 2 * len(inv_freq):
        raise ConfigError(
            f"{f.where}: index_head_dim ({indexer.head_dim}) must be at least the {2 * len(inv_freq)} rotary dimensions"
        )
    return tuple(
        None
        if kind == WINDOW
        else Compression(*kinds[kind], indexer if kind == SPARSE else None, tuple(inv_freq))
        for kind in _layer_types(f, count)
    )


def _layer_types(f: Fields, count: int) -> list[str]:
    """The kind of each layer: by name, or by its ratio. Lists may go on with the head's layers, which have windows
    alone."""
    types = f.data.get("layer_types")
    name = "compress_ratios" if types is None else "layer_types"
    ratios = f.data.get("compress_ratios")
    if types is None and isinstance(ratios, list):
        types = [RATIOS.get(ratio, "") if type(ratio) is int else "" for ratio in ratios]
    if (
        not isinstance(types, list)
        or len(types) < count
        or not set(RATIOS.values()).issuperset(map(str, types))
    ):
        known = ", ".join(map(str, RATIOS)) if name == "compress_ratios" else ", ".join(RATIOS.values())
        raise ConfigError(
            f"{f.where}: {name} must list {count} entries out of {known}, not {f.data.get(name)!r}"
        )
    if any(kind != WINDOW for kind in types[count:]):
        raise ConfigError(
            f"{f.where}: {name}: the head's layers attend to a window alone, not {types[count:]!r}"
        )
    return types[:count]


def _experts(f: Fields) -> MoeConfig:
    scores, method = f.data.get("scoring_func", "sqrtsoftplus"), f.data.get("topk_method", "noaux_tc")
    if scores not in ("sqrtsoftplus", "sigmoid", "softmax"):
        raise ConfigError(
            f"{f.where}: scoring_func {scores!r} is not supported, only 'sqrtsoftplus', 'sigmoid' and 'softmax'"
        )
    if method != "noaux_tc":
        raise ConfigError(f"{f.where}: topk_method {method!r} is not supported, only 'noaux_tc'")
    count, active = f.int("n_routed_experts", high=MAX_EXPERTS), f.int("num_experts_per_tok")
    if active > count:
        raise ConfigError(f"{f.where}: num_experts_per_tok ({active}) is above n_routed_experts ({count})")
    inner = f.int("moe_intermediate_size")
    scale = f.float("routed_scaling_factor", 1.5, low=0.0, high=1e6)
    return MoeConfig(
        hidden_size=f.int("hidden_size"),
        routing=Routing(count, active, f.bool("norm_topk_prob", True), scores, scale=scale),
        intermediate_size=inner,
        shared_intermediate_size=inner * f.int("n_shared_experts", 1, low=0, high=1 << 10),
        has_bias=True,
        activation=Activation(limit=_limit(f)),
    )


def _limit(f: Fields) -> float:
    return f.float("swiglu_limit", 10.0, low=0.0, high=1e30) if f.data.get("swiglu_limit", 10.0) else math.inf


def _streams(f: Fields) -> StreamSizes:
    return StreamSizes(
        num_streams=f.int("hc_mult", 4, high=64),
        hidden_size=f.int("hidden_size"),
        eps=f.float("hc_eps", 1e-6, low=0.0, high=1.0),
        norm_eps=f.float("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        iterations=f.int("hc_sinkhorn_iters", 20, high=1000),
    )


def _hashed_layers(f: Fields, count: int) -> frozenset[int]:
    """The layers that look their experts up: listed layer by layer, or the first ones."""
    types = f.data.get("mlp_layer_types")
    if types is None:
        return frozenset(range(min(count, f.int("num_hash_layers", 3, low=0))))
    if (
        not isinstance(types, list)
        or len(types) < count
        or not {"hash_moe", "moe"}.issuperset(map(str, types))
    ):
        raise ConfigError(
            f"{f.where}: mlp_layer_types must list {count} times 'hash_moe' or 'moe', not {types!r}"
        )
    return frozenset(i for i, kind in enumerate(types[:count]) if kind == "hash_moe")


def decoder_layer(config: ModelConfig, index: int | None, scope: Scope) -> StreamLayer:
    """A layer of the model, or, without an index, of its head."""
    assert config.compressed is not None and config.streams is not None and config.moe is not None
    compression = None if index is None else config.compressions[index]
    num_pairs = config.rotary_dim // 2
    rope = PairRope(0 if compression is None else num_pairs, num_pairs)
    mixer = CompressedAttention(
        config.compressed, compression, rope, scope("self_attn"), on_pages=index is None
    )
    table_size = config.vocab_size if index in config.hashed_layers else None
    mlp = MoeMlp(config.moe, scope("mlp"), table_size)
    return StreamLayer(scope.prefix.rstrip("."), mixer, mlp, config.streams, scope, config.eps)


_COMPRESSOR = {"wkv": "kv_proj", "wgate": "gate_proj", "norm": "kv_norm", "ape": "position_bias"}
_EXPERT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_BLOCK = (
    {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn.wq_a": "self_attn.q_a_proj",
        "attn.q_norm": "self_attn.q_a_norm",
        "attn.wq_b": "self_attn.q_b_proj",
        "attn.wkv": "self_attn.kv_proj",
        "attn.kv_norm": "self_attn.kv_norm",
        "attn.wo_a": "self_attn.o_a_proj",
        "attn.wo_b": "self_attn.o_b_proj",
        "attn.attn_sink": "self_attn.sinks",
        "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
        "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
        "ffn.gate": "mlp.gate",
        "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    }
    | {
        f"hc_{part}_{what}": f"{part}_hc.{what}"
        for part in ("attn", "ffn")
        for what in ("fn", "base", "scale")
    }
    | {f"attn.compressor.{disk}": f"self_attn.compressor.{name}" for disk, name in _COMPRESSOR.items()}
    | {
        f"attn.indexer.compressor.{disk}": f"self_attn.compressor.indexer.{name}"
        for disk, name in _COMPRESSOR.items()
    }
    | {f"ffn.experts.{{}}.{disk}": f"mlp.experts.{{}}.{name}" for disk, name in _EXPERT.items()}
    | {f"ffn.shared_experts.{disk}": f"mlp.shared_expert.{name}" for disk, name in _EXPERT.items()}
)
"""What stands in a layer of the target or of the head."""
_COLLAPSE = {f"hc_head_{what}": f"hc_head.hc_{what}" for what in ("fn", "base", "scale")}
_JOIN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "e_proj": "fc_embedding",
    "h_proj": "fc_hidden",
    "emb.tok_emb": "embed_tokens",
    "head": "lm_head",
}
MODULES = (
    {"embed": "embed_tokens", "head": "lm_head"}
    | _COLLAPSE
    | {f"layers.{{}}.{disk}": f"layers.{{}}.{name}" for disk, name in _BLOCK.items()}
    | {
        f"mtp.{{}}.{disk}": f"mtp.layers.{{}}.{name}"
        for disk, name in (_BLOCK | _COLLAPSE | _JOIN | {"norm": "norm"}).items()
    }
)
NAMING = Naming(modules=MODULES, copies=True)
HEAD = HeadSpec(
    tap="streams",
    join="sum",
    recycle="streams",
    joins_in_layers=True,
    layers_field="num_nextn_predict_layers",
)

FAMILY = Family(
    releases="DeepSeek-V4-Flash and V4-Pro, as first released",
    oracle="transformers; the head: its published definition",
    config=read_config,
    layer=decoder_layer,
    naming=NAMING,
    mtp=HEAD,
    gguf=deepseek_v4_gguf.SPEC,
)
