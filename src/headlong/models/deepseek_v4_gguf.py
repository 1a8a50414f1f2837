"""DeepSeek-V4 in GGUF files (`deepseek4`): what its tensors are called."""

from headlong.checkpoint.gguf_names import GgufNames

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
)
