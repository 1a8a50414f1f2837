"""What a config.json may say, and what of it is refused, by name."""

import copy
import json
import math
from dataclasses import replace

import pytest

from headlong import LLM
from headlong.errors import CheckpointError, ConfigError, HeadlongError
from headlong.models import registry
from support import tiny
from support.artifacts import CONFIGS
from support.tiny import LINEAR


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("dense"), "dense", vocab_size=64)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("moe"), "moe", vocab_size=64)


@pytest.mark.parametrize("model_type", ["gemma", "qwen1", "qwen3_5_vision", "", None, 7, [], {}])
def test_unsupported_model_types(model_type):
    with pytest.raises(ConfigError, match=r"model_type .* is not supported; Headlong serves .*qwen3_5"):
        registry.find({"model_type": model_type})


HUGE = 1 << 60
WRONG_SIZES = (0, -1, HUGE, 2.0, "8", None, True, [8], math.nan)
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
EXPERT_SIZES = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
WRONG_VALUES = {
    "rms_norm_eps": (0.0, -1e-6, math.nan, math.inf, "1e-6", None, True, 10.0),
    "hidden_act": ("gelu", None, 3),
    "attn_output_gate": (False, "yes", None),
    "attention_bias": ("false", 0, None),
    "tie_word_embeddings": ("true", 1, None),
    "layer_types": (
        [],
        ["linear_attention"] * 2,
        ["linear_attention", "full_attention", "sliding_attention"],
        "full_attention",
        [1, 2, 3],
        [["full_attention"]] * 3,
        {},
    ),
    "num_key_value_heads": (3, 8),
    "linear_num_key_heads": (3, 8),
    "eos_token_id": ("</s>", -1, 1.5, [1, "2"], True, {}),
    "rope_parameters": ("default", [1], 3),
}
WRONG_ROPE = {
    "rope_type": ("xpos", "su-scaled", 4),
    "rope_theta": (0.0, -1.0, math.nan, math.inf, "1e4", None, True),
    "partial_rotary_factor": (0.0, -0.5, 1.5, math.nan, math.inf, 0.01, 0.2, "half", None),
}


def parse(config):
    return registry.read_config(config)


def config_of(made, **changes):
    return copy.deepcopy(tiny.read_config(made.folder)) | changes


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "wrapped"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in SIZES for value in WRONG_SIZES),
        *((field, value) for field, values in WRONG_VALUES.items() for value in values),
    ],
    ids=lambda x: repr(x) if not isinstance(x, str) else x,
)
def test_a_config_value_that_cannot_be(dense, field, value, wrapped):
    config = config_of(dense, **{field: value})
    if wrapped:
        config = {"model_type": "qwen3_5", "text_config": config}
    with pytest.raises(ConfigError, match=rf"config\.json.*\b{field}\b"):
        parse(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in EXPERT_SIZES for value in WRONG_SIZES),
        ("num_experts_per_tok", 7),
        ("mlp_only_layers", 3),
        ("mlp_only_layers", ["0"]),
        ("decoder_sparse_step", 0),
        ("decoder_sparse_step", "1"),
    ],
    ids=repr,
)
def test_an_expert_value_that_cannot_be(moe, field, value):
    with pytest.raises(ConfigError, match=rf"config\.json.*\b{field}\b"):
        parse(config_of(moe, **{field: value}))


def test_norm_topk_prob_must_be_a_truth_value(moe):
    with pytest.raises(ConfigError, match="norm_topk_prob"):
        parse(config_of(moe, model_type="qwen3_next", norm_topk_prob="no"))


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG_ROPE.items() for value in values], ids=repr
)
def test_a_rope_value_that_cannot_be(dense, field, value):
    config = config_of(dense)
    config["rope_parameters"][field] = value
    with pytest.raises(ConfigError, match=rf"config\.json.*\b{field}\b"):
        parse(config)


@pytest.mark.parametrize("text", [None, [], "x", 3])
def test_a_text_config_that_is_no_object(text):
    with pytest.raises(ConfigError, match="text_config must be an object"):
        parse({"model_type": "qwen3_5", "text_config": text})


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_config_value_that_is_missing(dense, field):
    config = config_of(dense)
    del config[field]
    with pytest.raises(ConfigError, match=field):
        parse(config)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("NaN", "rms_norm_eps must be"),
        ("Infinity", "rms_norm_eps must be"),
        ("1e999", "not valid JSON"),
    ],
)
def test_numbers_that_are_none_are_refused(dense, tmp_path, text, complaint):
    config = json.dumps(config_of(dense, rms_norm_eps=12345)).replace("12345", text)
    tiny.write(tmp_path, {}, tiny.tensors(dense))
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(HeadlongError, match=rf"config\.json: {complaint}"):
        LLM(tmp_path, device="cpu")


def test_an_absurd_config_is_refused_before_anything_is_allocated(dense, tmp_path):
    """Sizes within bounds that the disk does not bear out: an error about tensors, not about memory."""
    config = config_of(dense, hidden_size=1 << 24, vocab_size=1 << 24, intermediate_size=1 << 24)
    tiny.write(tmp_path, config, tiny.tensors(dense))
    with pytest.raises(CheckpointError, match="mis-shaped"):
        LLM(tmp_path, device="cpu")


def test_older_spellings_of_rope(dense):
    """`rope_scaling`, or the fields at the top level, mean the same."""
    config = config_of(dense)
    rope = config.pop("rope_parameters")
    expected = parse(config_of(dense))
    assert parse(config | {"rope_scaling": {"type": "default"} | rope}) == expected
    assert parse(config | {k: rope[k] for k in ("rope_theta", "partial_rotary_factor")}) == expected


@pytest.mark.parametrize(
    ("rope", "sections"),
    [
        ({"mrope_section": [2, 1, 1], "mrope_interleaved": True}, (2, 1, 1)),
        ({"rope_type": "mrope", "mrope_section": [2, 2, 0]}, (2, 2, 0)),
        ({"mrope_section": [2, 1, 1], "mrope_interleaved": False}, ()),
        ({"mrope_section": None}, ()),
    ],
)
def test_sections_of_rope(dense, rope, sections):
    config = config_of(dense)
    found = parse(config | {"rope_parameters": config["rope_parameters"] | rope})
    assert found.rotary_dim == 8 and found.rope_sections == sections
    assert replace(found, rope_sections=()) == parse(config)


@pytest.mark.parametrize(
    "sections", [[2, 1], [2, 2, 1], [4, -1, 1], [2, 1, True], [2.0, 1, 1], [], {}, "2, 1, 1", 4]
)
@pytest.mark.parametrize("interleaved", [True, False])
def test_sections_that_do_not_share_out_the_frequencies_are_refused(dense, sections, interleaved):
    config = config_of(dense)
    rope = config["rope_parameters"] | {"mrope_section": sections, "mrope_interleaved": interleaved}
    with pytest.raises(HeadlongError, match=r"rope_parameters: mrope_section must list .* in sum 4, not"):
        parse(config | {"rope_parameters": rope})


def test_sections_of_published_configs_are_read():
    """In their real size, and in the size they are kept in here: each config names its sections."""
    config, read = json.loads((CONFIGS / "Qwen--Qwen3.5-27B_config.json").read_text()), []
    for path in sorted(CONFIGS.glob("*_config.json")):
        if "mrope_section" in path.read_text():
            read.append(parse(json.loads(path.read_text())))
    assert len(read) == 17 and all(sum(found.rope_sections) == found.rotary_dim // 2 for found in read)
    text = config["text_config"]
    rope = text["rope_parameters"] | {"mrope_section": [11, 11, 10]}
    found = parse(config | {"text_config": text | {"head_dim": 256, "rope_parameters": rope}})
    assert found.rope_sections == (11, 11, 10) and found.rotary_dim == 64


def test_layer_types_by_interval(dense):
    config = config_of(dense, num_hidden_layers=5, layer_types=None, full_attention_interval=2)
    kinds = parse(config).layer_types
    assert [kind == LINEAR for kind in kinds] == [True, False, True, False, True]
