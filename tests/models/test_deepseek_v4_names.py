"""DeepSeek-V4's names, as its first release has them: there and back, in safetensors and in GGUF."""

import pytest

from headlong.checkpoint.names import canonical
from headlong.models.deepseek_v4 import NAMING
from headlong.models.deepseek_v4_gguf import NAMES as GGUF_NAMES
from headlong.quant.detect import PART_NAMES

LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.wq_a.scale": "self_attn.q_a_proj.scale",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.scale": "self_attn.kv_proj.scale",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.experts.255.w1.weight": "mlp.experts.255.gate_proj.weight",
    "ffn.experts.0.w2.scale": "mlp.experts.0.down_proj.scale",
    "ffn.experts.10.w3.weight_scale_2": "mlp.experts.10.up_proj.weight_scale_2",
    "ffn.shared_experts.w1.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_expert.down_proj.weight",
    "ffn.shared_experts.w3.scale": "mlp.shared_expert.up_proj.scale",
}
HEAD = {
    "e_proj.weight": "fc_embedding.weight",
    "h_proj.scale": "fc_hidden.scale",
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "norm.weight": "norm.weight",
    "hc_head_fn": "hc_head.hc_fn",
    "emb.tok_emb.weight": "embed_tokens.weight",
    "head.weight": "lm_head.weight",
}
OUTSIDE = {
    "embed.weight": "embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "norm.weight",
    "hc_head_base": "hc_head.hc_base",
}
EVERY = [
    *OUTSIDE.items(),
    *((f"layers.42.{disk}", f"layers.42.{name}") for disk, name in LAYER.items()),
    *((f"mtp.1.{disk}", f"mtp.layers.1.{name}") for disk, name in (LAYER | HEAD).items()),
]


@pytest.mark.parametrize(("disk", "name"), EVERY)
def test_there_and_back(disk, name):
    assert canonical(disk, NAMING, num_layers=43) == name
    assert NAMING.disk(name, 43) == disk


@pytest.mark.parametrize(
    "disk", ["layers.0.attn.wq_another.weight", "layers.0.ffn.experts.x.w1.weight", "wq_a"]
)
def test_what_it_does_not_know_keeps_its_name(disk):
    assert canonical(disk, NAMING, num_layers=43) == disk


def test_scales_are_parts():
    assert {"scale", "weight_scale", "weight_scale_2"} <= PART_NAMES


@pytest.mark.parametrize(
    ("disk", "name"),
    [
        ("output_hc_fn.weight", "hc_head.hc_fn"),
        ("token_embd.weight", "embed_tokens.weight"),
        ("blk.2.hc_attn_base.weight", "layers.2.attn_hc.base"),
        ("blk.2.attn_sinks.weight", "layers.2.self_attn.sinks"),
        ("blk.2.indexer.proj.weight", "layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight"),
        ("blk.2.indexer_compressor_ape.weight", "layers.2.self_attn.compressor.indexer.position_bias"),
        ("blk.2.attn_compressor_norm.weight", "layers.2.self_attn.compressor.kv_norm.weight"),
        ("blk.2.ffn_gate_tid2eid.weight", "layers.2.mlp.gate.tid2eid"),
        ("blk.2.exp_probs_b.bias", "layers.2.mlp.gate.e_score_correction_bias"),
        ("blk.2.ffn_down_exps.weight", "layers.2.mlp.experts.down_proj.weight"),
        ("blk.43.attn_output_a.weight", "mtp.layers.0.self_attn.o_a_proj.weight"),
        ("blk.43.nextn.eh_proj.weight", "mtp.layers.0.fc.weight"),
        ("blk.43.nextn.shared_head_norm.weight", "mtp.layers.0.norm.weight"),
    ],
)
def test_gguf(disk, name):
    assert GGUF_NAMES.canonical(disk, 43) == name
    assert GGUF_NAMES.disk(name, 43) == disk


def test_a_tensor_is_called_the_same_whatever_the_container():
    """Every tensor of a layer that safetensors have GGUF has, too, under the same canonical name."""
    names = {f"layers.1.{name}" for name in LAYER.values() if not name.endswith((".scale", "_scale_2"))}
    fused = {name for name in names if ".experts." not in name}
    assert all(GGUF_NAMES.disk(name, 43) is not None for name in fused)
