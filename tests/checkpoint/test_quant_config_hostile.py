"""No quantisation config can do harm: values of every wrong type, patterns that backtrack for ever, anything at all."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headlong.checkpoint.quant_config import Claim, QuantConfig
from support.artifacts import time_limit

LAYER = "model.language_model.layers.3."
Q_PROJ, GATE_PROJ, EXPERT = (
    LAYER + name for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.experts.5.down_proj")
)
EMBEDDING, LM_HEAD, FC = "model.language_model.embed_tokens", "lm_head", "mtp.fc"


METHODS = (
    "fp8",
    "compressed-tensors",
    "modelopt",
    "gptq",
    "awq",
    "mlx",
    "auto-round",
    "quark",
    "bitsandbytes",
    "torchao",
    "unheard-of",
)
KEYS = (
    "exclude",
    "llm_int8_skip_modules",
    "global_quant_config",
    "layer_quant_config",
    "extra_config",
    "block_name_to_quantize",
    "packing_format",
    "data_type",
    "act_bits",
    "meta",
    "mode",
    "activation_scheme",
    "bnb_4bit_quant_type",
    "load_in_4bit",
    "modules_to_not_convert",
    "ignore",
    "exclude_modules",
    "ignored_layers",
    "config_groups",
    "quantized_layers",
    "dynamic",
    "bits",
    "group_size",
    "weight_block_size",
    "checkpoint_format",
    "lm_head",
    "quant_algo",
    "quant_type",
    "include_input_output_embeddings",
    Q_PROJ,
)
WRONG = (
    None,
    True,
    False,
    0,
    -1,
    2.5,
    10**400,
    "",
    "Linear",
    "re:(",
    [],
    {},
    [[]],
    [None, 1, {}, "re:[", "*[", "re:"],
    {"": None},
    {"+:": {"self": 1, "bits": []}, "-:(": 3, "[": [], "+:.*": {"self": {}, "known": 0, "method": None}},
    {"a": {"targets": 5, "weights": {}}},
    {"a": {"targets": True, "weights": {"num_bits": {}, "type": []}}},
    {"a": {"targets": {"Linear": 1}, "weights": {"num_bits": "4"}}},
    {"a": {"targets": [None, "Linear", ["Linear"]], "weights": {"group_size": "x", "block_structure": 7}}},
    {"a": {"targets": None, "weights": None}, "b": None, "c": [], "d": 4},
    {Q_PROJ: {"quant_algo": None}, "b": {"quant_algo": ["FP8"]}, "*": 3},
    {"self": 1, "bits": {"self": 2}},
)
MODULES = (Q_PROJ, EXPERT, FC, LM_HEAD, EMBEDDING, "")


def ask(config: Any, beside: Any = None) -> None:
    found = QuantConfig(config, beside or {})
    for module in MODULES:
        said = found.claim(module, module.removeprefix("model.language_model."))
        assert said is None or isinstance(said, Claim)


@pytest.mark.parametrize("method", METHODS)
def test_values_of_every_wrong_type(method):
    for key, value in itertools.product(KEYS, WRONG):
        section = {"quant_method": method, key: value}
        if method == "mlx":
            section = {"bits": 4, "group_size": 64, key: value}
        try:
            ask({"quantization_config": section})
        except Exception as error:
            pytest.fail(f"{key} = {value!r} raises {error!r}")


@pytest.mark.parametrize("section", WRONG, ids=repr)
def test_sections_of_every_wrong_type(section):
    ask({"quantization_config": section, "text_config": section, "quantization": section})
    ask({"quantization_config": {"quant_method": section}}, {"quantization": section})
    ask({"text_config": {"quantization_config": section}}, {"quantization": {"quant_algo": section}})


BOMBS = {
    "nested repeats": "(.*)*(.*)*(.*)*(.*)*x",
    "nested pluses": "^(([a-z_.0-9])+.?)+[A-Z]$",
    "alternatives": "(a|b|[a-z]|[a-z_]|.)*Q",
    "many stars": ".*" * 60 + "Q",
    "back references": r"(.*)(.*)(.*)(.*)\1\2\3\4Q",
    "look behind": "(?=(.*)*(.*)*(.*)*Q)",
    "a repetition too large": "x{99999999999999999999}",
    "repetitions of repetitions": "((((x{1,9999}){1,9999}){1,9999}){1,9999})",
    "deep groups": "(" * 240 + ")" * 240,
    "deeper groups": "(" * 5000 + ")" * 5000,
    "unbalanced": "(" * 5000,
    "unknown flags": "(?Z)",
    "a late flag": "x(?i)y",
    "a NUL": "\0",
}


@pytest.mark.parametrize("pattern", BOMBS.values(), ids=BOMBS)
def test_patterns_that_backtrack_for_ever(pattern):
    """Rules of a config are matched against thousands of names, so one second for six is generous."""
    spellings = [
        {"quant_method": "gptq", "bits": 4, "dynamic": {f"-:{pattern}": {}}},
        {"quant_method": "compressed-tensors", "ignore": [f"re:{pattern}"]},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"targets": [f"re:{pattern}"], "weights": {"num_bits": 4}}},
        },
    ]
    for section in spellings:
        with time_limit(20.0):
            ask({"quantization_config": section})


@pytest.mark.parametrize(
    "pattern", ["*a" * 200 + "Q", "*" * 400 + "Q", "[" * 300, "?*" * 150 + "Q", "[!]a-]*" * 60]
)
def test_shell_patterns_that_backtrack_for_ever(pattern):
    with time_limit(20.0):
        ask({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [pattern]}})


def test_real_patterns_are_not_taken_for_bombs():
    section = {"quant_method": "gptq", "bits": 4, "dynamic": {}}
    for pattern in (
        r".*mtp\.fc.*",
        r".*\.layers\.(0|1|3)\..*",
        r".*lm_head$",
        "^mtp[.].+$",
        r".*layers\.\d+\.mlp.*",
    ):
        section["dynamic"] = {f"-:{pattern}": {}}
        found = [
            QuantConfig({"quantization_config": section}, {}).claim(module, module)
            for module in (FC, Q_PROJ, LM_HEAD, GATE_PROJ)
        ]
        assert None in [each.format for each in found if each is not None], pattern


NAMES = st.sampled_from(
    ["Linear", "re:.*", "mtp*", "a", "self", "targets", "weights", "quant_algo", "bits", *KEYS]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | NAMES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(section=st.dictionaries(NAMES, VALUES, max_size=6), method=st.sampled_from(METHODS))
def test_any_section_at_all(section, method):
    """What JSON can say, under the keys that are read."""
    section = json.loads(json.dumps(section | {"quant_method": method}))
    with time_limit(20.0):
        ask({"quantization_config": section})
