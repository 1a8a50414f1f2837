"""DeepSeek-V4 in GGUF files (`deepseek4`): what its tensors and sizes are called.

llama.cpp reads the head from a file of its own, `mtp-` before the model's name, in which the collapse of the streams is
the head's.
"""

from collections.abc import Mapping
from typing import Any

from headlong.checkpoint.gguf_config import Keys, short
from headlong.checkpoint.gguf_names import GgufNames
from headlong.errors import CheckpointError
from headlong.models.config import ModelConfig
from headlong.models.experts import MAX_EXPERTS, SIGMOID, SOFTMAX, expert_keys
from headlong.models.gguf import GgufSpec, Tensors
from headlong.ops.rope.scaling import YarnScaling

SCORES = {SOFTMAX: "softmax", SIGMOID: "sigmoid", 4: "sqrtsoftplus"}
"""The numbers that GGUF has for scores."""
LIMITS = ("swiglu_clamp_exp", "swiglu_clamp_shexp")
_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_norm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv": "self_attn.kv_proj",
    "attn_kv_a_norm": "self_attn.kv_norm",
    "attn_output_a": "self_attn.o_a_proj",
    "attn_output_b": "self_attn.o_b_proj",
    "attn_compressor_kv": "self_attn.compressor.kv_proj",
    "attn_compressor_gate": "self_attn.compressor.gate_proj",
    "attn_compressor_norm": "self_attn.compressor.kv_norm",
    "indexer.proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj",
    "indexer_compressor_kv": "self_attn.compressor.indexer.kv_proj",
    "indexer_compressor_gate": "self_attn.compressor.indexer.gate_proj",
    "indexer_compressor_norm": "self_attn.compressor.indexer.kv_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_TENSORS = {
    "attn_sinks": "self_attn.sinks",
    "attn_compressor_ape": "self_attn.compressor.position_bias",
    "indexer_compressor_ape": "self_attn.compressor.indexer.position_bias",
    "ffn_gate_tid2eid": "mlp.gate.tid2eid",
} | {f"hc_{part}_{kind}": f"{part}_hc.{kind}" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")}
"""Tensors without a suffix of their own, which GGUF calls weights all the same."""
_COLLAPSE = {f"output_hc_{kind}.weight": f"hc_head.hc_{kind}" for kind in ("fn", "base", "scale")}
NAMES = GgufNames(
    "deepseek4",
    {f"{disk}.weight": f"{name}.weight" for disk, name in _MODULES.items()}
    | {f"{disk}.weight": name for disk, name in _TENSORS.items()}
    | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    joins_in_layers=True,
    outside=_COLLAPSE,
    of_head={f"output_hc_{kind}.weight": f"hc_head.hc_{kind}" for kind in ("fn", "base", "scale")},
    joined={"fc": ("fc_embedding", "fc_hidden")},
)


def _fields(keys: Keys, tensors: Tensors, num_layers: int) -> dict[str, Any]:  # noqa: ARG001 - keys say it all
    count = keys.int("expert_count", high=MAX_EXPERTS)
    scores = keys.int("expert_gating_func", 4)
    if scores not in SCORES:
        raise keys.fault("expert_gating_func", f"must be one of {', '.join(map(str, SCORES))}, not {scores}")
    return {
        "qk_rope_head_dim": keys.int("rope.dimension_count"),
        "partial_rotary_factor": None,
        "rope_parameters": None,
        "rope_theta": keys.float("rope.freq_base", 10000.0, high=1e12),
        "rope_scaling": _yarn(keys),
        "compress_rope_theta": keys.float("attention.compress_rope_freq_base", 160000.0, high=1e12),
        "compress_ratios": _ratios(keys, num_layers),
        "sliding_window": keys.int("attention.sliding_window"),
        "q_lora_rank": keys.int("attention.q_lora_rank"),
        "o_groups": keys.int("attention.output_group_count"),
        "o_lora_rank": keys.int("attention.output_lora_rank"),
        "index_n_heads": keys.int("attention.indexer.head_count"),
        "index_head_dim": keys.int("attention.indexer.key_length"),
        "index_topk": keys.int("attention.indexer.top_k"),
        "hc_mult": keys.int("hyper_connection.count"),
        "hc_sinkhorn_iters": keys.int("hyper_connection.sinkhorn_iterations"),
        "hc_eps": keys.float("hyper_connection.epsilon", 1e-6, high=1.0),
        "num_hash_layers": keys.int("hash_layer_count", 0, low=0),
        "n_routed_experts": count,
        "num_experts_per_tok": keys.int("expert_used_count", high=count),
        "moe_intermediate_size": keys.int("expert_feed_forward_length"),
        "n_shared_experts": keys.int("expert_shared_count", 0, low=0),
        "scoring_func": SCORES[scores],
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": keys.float("expert_weights_scale", 1.0, high=1e6),
        "swiglu_limit": _limit(keys),
    }


def _ratios(keys: Keys, num_layers: int) -> list[int]:
    """The head's blocks may be listed too; they have windows alone."""
    name = "attention.compress_ratios"
    given = keys.metadata.get(f"{keys.arch}.{name}")
    if not isinstance(given, list) or len(given) < num_layers or not all(type(each) is int for each in given):
        raise keys.fault(name, f"must be a whole number for each of {num_layers} layers, not {short(given)}")
    return given[:num_layers]


def _limit(keys: Keys) -> float | None:
    """One limit for all blocks, of the shared expert too; 0 is none."""
    found: set[float] = set()
    for name in LIMITS:
        given = keys.metadata.get(f"{keys.arch}.{name}", [])
        each = given if isinstance(given, list) else [given]
        if not all(type(limit) in (int, float) and 0 <= limit < 1e30 for limit in each):
            raise keys.fault(name, f"must be numbers from 0 on, not {short(given)}")
        found |= {float(limit) for limit in each}
    if len(found) > 1:
        raise keys.fault(LIMITS[0], f"different limits are not supported: {short(sorted(found))}")
    return found.pop() if found else 0.0


def _yarn(keys: Keys) -> dict[str, Any] | None:
    """How the layers with entries are scaled, and no others."""
    way = keys.metadata.get(f"{keys.arch}.rope.scaling.type", "none")
    if way == "none":
        return None
    if way != "yarn":
        raise keys.fault("rope.scaling.type", f"{short(way)} is not supported, only 'none' and 'yarn'")
    return {
        "type": "yarn",
        "factor": keys.float("rope.scaling.factor", high=1e6),
        "original_max_position_embeddings": keys.int("rope.scaling.original_context_length", high=1 << 30),
        "beta_fast": keys.float("rope.scaling.yarn_beta_fast", 32.0, high=1e6),
        "beta_slow": keys.float("rope.scaling.yarn_beta_slow", 1.0, high=1e6),
    }


def _keys(config: ModelConfig, text: Mapping[str, Any], head_layers: int) -> dict[str, Any]:
    c, moe, streams, second = config.compressed, config.moe, config.streams, config.second_rope
    assert c is not None and moe is not None and streams is not None and second is not None
    ratios = [0 if each is None else each.ratio for each in config.compressions] + [0] * head_layers
    if not {0, 4, 128}.issuperset(ratios):
        raise CheckpointError(
            "config.json: compress_rates: GGUF knows layers of 4 and of 128 tokens to an entry"
        )
    hashed = len(config.hashed_layers)
    if config.hashed_layers != frozenset(range(hashed)):
        raise CheckpointError(
            "config.json: mlp_layer_types: GGUF can say that the first layers have tables, no others"
        )
    indexer = next((each.indexer for each in config.compressions if each is not None and each.indexer), None)
    limit = moe.activation.limit
    limits = [limit if limit < 1e30 else 0.0] * len(ratios)
    return (
        expert_keys(config)
        | {
            "attention.key_length": c.head_dim,
            "attention.value_length": c.head_dim,
            "attention.sliding_window": c.window,
            "attention.q_lora_rank": c.query_rank,
            "attention.output_group_count": c.num_groups,
            "attention.output_lora_rank": c.group_rank,
            "attention.compress_ratios": ratios,
            "attention.compress_rope_freq_base": second.theta,
            "attention.indexer.head_count": text.get("index_n_heads", 64)
            if indexer is None
            else indexer.num_heads,
            "attention.indexer.key_length": text.get("index_head_dim", 128)
            if indexer is None
            else indexer.head_dim,
            "attention.indexer.top_k": text.get("index_topk", 512) if indexer is None else indexer.top_k,
            "hyper_connection.count": streams.num_streams,
            "hyper_connection.sinkhorn_iterations": streams.iterations,
            "hyper_connection.epsilon": streams.eps,
            "embedding_length_out": streams.num_streams * config.hidden_size,
            "hash_layer_count": hashed,
            "expert_shared_count": moe.shared_intermediate_size // moe.intermediate_size,
            "expert_gating_func": next(
                number for number, name in SCORES.items() if name == moe.routing.scores
            ),
            "expert_weights_norm": moe.routing.normalise,
            "expert_weights_scale": moe.routing.scale,
            **dict.fromkeys(LIMITS, limits),
        }
        | _yarn_keys(config)
    )


def _yarn_keys(config: ModelConfig) -> dict[str, Any]:
    assert config.second_rope is not None
    scaling = config.second_rope.scaling
    if scaling is None:
        return {}
    if not isinstance(scaling, YarnScaling) or scaling.amplitude != 1.0 or not scaling.truncate:
        raise CheckpointError("config.json: rope_scaling: GGUF knows YaRN without a factor of its own alone")
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling.factor,
        "rope.scaling.original_context_length": scaling.original_max_position,
        "rope.scaling.yarn_beta_fast": scaling.beta_fast,
        "rope.scaling.yarn_beta_slow": scaling.beta_slow,
    }


SPEC = GgufSpec(NAMES, "deepseek_v4", "DeepseekV4ForCausalLM", fields=_fields, keys=_keys, head_apart=True)
