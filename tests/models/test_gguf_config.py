"""Metadata to config and back: fields against what the model was made with, damage against the key it names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from headlong.checkpoint.source import EMBEDDED
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.errors import CheckpointError, ConfigError
from headlong.models import registry
from headlong.models.registry import config_from_gguf, gguf_metadata

QWEN = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 9,
    "qwen35.context_length": 4096,
    "qwen35.embedding_length": 384,
    "qwen35.feed_forward_length": 1024,
    "qwen35.attention.head_count": 6,
    "qwen35.attention.head_count_kv": 2,
    "qwen35.attention.key_length": 64,
    "qwen35.attention.value_length": 64,
    "qwen35.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "qwen35.rope.freq_base": 10000.0,
    "qwen35.rope.dimension_count": 16,
    "qwen35.rope.dimension_sections": [3, 3, 2, 0],
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 64,
    "qwen35.ssm.group_count": 4,
    "qwen35.ssm.time_step_rank": 8,
    "qwen35.ssm.inner_size": 512,
    "qwen35.full_attention_interval": 4,
    "qwen35.nextn_predict_layers": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.bos_token_id": 0,
}
"""What llama.cpp's own files say of a model like the embedded one."""
LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 5,
}
MOE = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 48,
    "expert_shared_feed_forward_length": 40,
}


def info(name: str, *shape: int, dtype: str = "F16", file: str = "model.gguf", start: int = 0) -> TensorInfo:
    return TensorInfo(name, dtype, shape, Path(file), start, 0)


def table(*infos: TensorInfo) -> dict[str, TensorInfo]:
    return {tensor.name: tensor for tensor in infos}


EMBEDDING = info("token_embd.weight", 8192, 384)


def embedded_config() -> dict[str, Any]:
    return json.loads((EMBEDDED / "config.json").read_text())


def test_embedded_model() -> None:
    """Every number of the real config.json comes back from the metadata."""
    found = config_from_gguf(QWEN, table(EMBEDDING))
    not_stored = {"dtype", "initializer_range", "attention_dropout", "full_attention_interval"}
    real = {key: value for key, value in embedded_config().items() if key not in not_stored}
    assert {key: found[key] for key in real} == real
    assert found["linear_value_heads_tiled"] is True
    mine = registry.read_config(found)
    theirs = registry.read_config(real)
    for field in (
        "attention",
        "layer_types",
        "eps",
        "rope_theta",
        "rotary_dim",
        "tied",
        "max_position",
        "vocab_size",
    ):
        assert getattr(mine, field) == getattr(theirs, field)


def test_metadata_of_the_embedded_model() -> None:
    """Of what llama.cpp's files say, all but the tokenizer's; and ours can be read by the gguf package's names."""
    found = gguf_metadata(embedded_config(), head_layers=1)
    expected = {key: value for key, value in QWEN.items() if not key.startswith("tokenizer.")}
    assert {key: found[key] for key in expected} == expected | {
        "qwen35.attention.layer_norm_rms_epsilon": 1e-6
    }
    assert found.keys() - expected.keys() == {"qwen35.vocab_size"}
    plain = gguf_metadata(embedded_config(), head_layers=0)
    assert plain["qwen35.block_count"] == 8 and "qwen35.nextn_predict_layers" not in plain


def test_there_and_back() -> None:
    config = config_from_gguf(QWEN, table(EMBEDDING))
    again = config_from_gguf(gguf_metadata(config, head_layers=1), table(EMBEDDING))
    assert again == {key: value for key, value in config.items() if not key.endswith("_token_id")}


@pytest.mark.parametrize("heads", [(4, 4), (2, 8)])
def test_tiled_only_with_more_value_heads(heads: tuple[int, int]) -> None:
    changes = {"qwen35.ssm.group_count": heads[0], "qwen35.ssm.time_step_rank": heads[1]}
    found = config_from_gguf(QWEN | changes, table(EMBEDDING))
    assert found.get("linear_value_heads_tiled", False) == (heads[1] > heads[0])
    assert found["linear_value_head_dim"] == 512 // heads[1]


def test_experts() -> None:
    metadata = {key.replace("qwen35.", "qwen35moe."): value for key, value in QWEN.items()}
    metadata |= {"general.architecture": "qwen35moe"} | {f"qwen35moe.{k}": v for k, v in MOE.items()}
    del metadata["qwen35moe.feed_forward_length"]
    found = config_from_gguf(metadata, table(EMBEDDING, info("output.weight", 8192, 384)))
    assert found["model_type"] == "qwen3_5_moe_text" and not found["tie_word_embeddings"]
    parsed = registry.read_config(found)
    assert parsed.moe is not None
    assert (parsed.moe.num_experts, parsed.moe.num_active) == (8, 2)
    assert (parsed.moe.intermediate_size, parsed.moe.shared_intermediate_size) == (48, 40)
    back = gguf_metadata(found, head_layers=1)
    assert {key: back[f"qwen35moe.{key}"] for key in MOE} == MOE
    metadata["qwen35moe.expert_used_count"] = 9
    with pytest.raises(CheckpointError, match="expert_used_count"):
        config_from_gguf(metadata, table(EMBEDDING))


def test_llama() -> None:
    tensors = table(
        info("token_embd.weight", 49152, 576), info("blk.0.attn_q.bias", 576), info("blk.0.ffn_up.bias", 1536)
    )
    found = config_from_gguf(LLAMA, tensors)
    assert found["model_type"] == "llama"
    assert found["head_dim"] == 64 and found["num_key_value_heads"] == 3 and found["vocab_size"] == 49152
    assert found["rms_norm_eps"] == 1e-5
    assert found["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 1.0,
    }
    assert found["eos_token_id"] == [2, 5]
    assert found["attention_bias"] and found["mlp_bias"] and found["tie_word_embeddings"]
    assert "layer_types" not in found and "mtp_num_hidden_layers" not in found
    plain = config_from_gguf(LLAMA, table(info("token_embd.weight", 49152, 576)))
    assert not plain["attention_bias"] and not plain["mlp_bias"]
    back = gguf_metadata(found, head_layers=0)
    expected = {key: value for key, value in LLAMA.items() if not key.startswith("tokenizer.")}
    assert {key: back[key] for key in expected} == expected | {"llama.attention.layer_norm_rms_epsilon": 1e-5}


def test_layer_types_of_any_order() -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    config = embedded_config() | {"num_hidden_layers": 4, "layer_types": kinds}
    metadata = gguf_metadata(config, head_layers=1)
    assert metadata["qwen35.attention.recurrent_layers"] == [False, True, True, False, False]
    assert "qwen35.full_attention_interval" not in metadata
    assert config_from_gguf(metadata, table(EMBEDDING))["layer_types"] == kinds


def test_rotary_part_is_never_rounded_down() -> None:
    for head_dim in range(2, 400, 2):
        for rotary in range(2, head_dim + 1, 2):
            changes = {"key_length": head_dim, "value_length": head_dim}
            metadata = LLAMA | {f"llama.attention.{key}": value for key, value in changes.items()}
            found = config_from_gguf(metadata | {"llama.rope.dimension_count": rotary}, table(EMBEDDING))
            assert int(head_dim * found["rope_parameters"]["partial_rotary_factor"]) == rotary


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qwen35.embedding_length", None),
        ("qwen35.embedding_length", 0),
        ("qwen35.embedding_length", 2**40),
        ("qwen35.embedding_length", "384"),
        ("qwen35.attention.head_count", [6]),
        ("qwen35.attention.head_count_kv", 5),
        ("qwen35.attention.head_count_kv", [0, 2, 3]),
        ("qwen35.attention.head_count_kv", []),
        ("qwen35.attention.value_length", 32),
        ("qwen35.attention.layer_norm_rms_epsilon", None),
        ("qwen35.attention.layer_norm_rms_epsilon", float("nan")),
        ("qwen35.attention.layer_norm_rms_epsilon", -1.0),
        ("qwen35.context_length", None),
        ("qwen35.feed_forward_length", None),
        ("qwen35.rope.dimension_count", 128),
        ("qwen35.rope.freq_base", float("inf")),
        ("qwen35.rope.scaling.type", "longrope"),
        ("qwen35.ssm.conv_kernel", 1),
        ("qwen35.ssm.group_count", 3),
        ("qwen35.ssm.time_step_rank", None),
        ("qwen35.ssm.inner_size", 511),
        ("qwen35.ssm.state_size", -64),
        ("qwen35.full_attention_interval", 0),
        ("qwen35.attention.recurrent_layers", [True]),
        ("qwen35.attention.recurrent_layers", [1] * 9),
        ("qwen35.block_count", 1),
        ("tokenizer.ggml.eos_token_id", -1),
        ("general.architecture", "gemma3"),
        ("general.architecture", None),
    ],
)
def test_damage_names_the_key(key: str, value: object) -> None:
    metadata = {k: v for k, v in QWEN.items() if k != key} | ({} if value is None else {key: value})
    related = {"qwen35.ssm.group_count": "qwen35.ssm.time_step_rank"}
    with pytest.raises(CheckpointError) as caught:
        config_from_gguf(metadata, table(EMBEDDING))
    assert str(caught.value).startswith(related.get(key, key)) and "\n" not in str(caught.value)


def test_head_count_kv_by_block() -> None:
    counts = [0, 0, 0, 2, 0, 0, 0, 2, 2]
    found = config_from_gguf(QWEN | {"qwen35.attention.head_count_kv": counts}, table(EMBEDDING))
    assert found["num_key_value_heads"] == 2


def test_vocabulary_without_an_embedding() -> None:
    assert config_from_gguf(QWEN | {"tokenizer.ggml.tokens": ["a", "b"]}, {})["vocab_size"] == 2
    assert config_from_gguf(QWEN | {"qwen35.vocab_size": 7}, {})["vocab_size"] == 7
    with pytest.raises(CheckpointError, match=r"qwen35\.vocab_size"):
        config_from_gguf(QWEN, {})
    with pytest.raises(CheckpointError, match=r"token_embd\.weight"):
        config_from_gguf(QWEN, table(info("token_embd.weight", 8192)))


def test_experts_of_llama_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"llama\.expert_count"):
        config_from_gguf(LLAMA | {"llama.expert_count": 8}, table(EMBEDDING))


def test_unknown_models_have_no_architecture() -> None:
    with pytest.raises(CheckpointError, match="'qwen3_next'"):
        registry.written_spec({"model_type": "qwen3_next"})
    with pytest.raises(ConfigError, match="'xpos'"):
        gguf_metadata(embedded_config() | {"rope_parameters": {"rope_type": "xpos"}}, head_layers=0)


def test_sections_of_positions() -> None:
    """Those of the released models, whose 32 pairs are shared 11, 11, 10; any other number is shared out whole."""
    rope = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    key = "qwen35.rope.dimension_sections"
    for head_dim in (16, 64, 256, 512):
        config = embedded_config() | {"head_dim": head_dim, "rope_parameters": rope}
        found = gguf_metadata(config, head_layers=0)[key]
        assert sum(found) == head_dim // 8 and found[0] - found[2] in (0, 1) and found[3] == 0
        if head_dim == 256:
            assert found == [11, 11, 10, 0]
    config = embedded_config() | {"rope_parameters": rope | {"mrope_section": [4, 2, 2]}}
    assert gguf_metadata(config, head_layers=0)[key] == [4, 2, 2, 0]


def test_wrapped_config() -> None:
    text = embedded_config()
    wrapped = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    assert gguf_metadata(wrapped, head_layers=1) == gguf_metadata(text, head_layers=1)


def test_keys_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    """A writer's named methods give the keys we give."""
    writer = GGUFWriter(tmp_path / "keys.gguf", "qwen35")
    for method, value in (
        ("block_count", 9),
        ("context_length", 4096),
        ("embedding_length", 384),
        ("feed_forward_length", 1024),
        ("head_count", 6),
        ("head_count_kv", 2),
        ("key_length", 64),
        ("value_length", 64),
        ("layer_norm_rms_eps", 1e-6),
        ("rope_freq_base", 10000.0),
        ("rope_dimension_count", 16),
        ("rope_dimension_sections", [3, 3, 2, 0]),
        ("ssm_conv_kernel", 4),
        ("ssm_state_size", 64),
        ("ssm_group_count", 4),
        ("ssm_time_step_rank", 8),
        ("ssm_inner_size", 512),
        ("full_attention_interval", 4),
        ("nextn_predict_layers", 1),
        ("vocab_size", 8192),
    ):
        getattr(writer, f"add_{method}")(value)
    writer.add_tensor("token_embd.weight", torch.zeros(1, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = GGUFReader(tmp_path / "keys.gguf").fields
    theirs = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    mine = gguf_metadata(embedded_config(), head_layers=1)
    eps = "qwen35.attention.layer_norm_rms_epsilon"
    assert mine.pop(eps) == pytest.approx(theirs.pop(eps), rel=1e-6)
    assert mine == theirs
