"""What a quantisation config claims of a module, in every spelling."""

import json
from typing import Any, ClassVar

import pytest

from headlong.checkpoint.names import canonical
from headlong.checkpoint.quant_config import Claim, QuantConfig
from headlong.models.deepseek_v4 import NAMING
from support.artifacts import CONFIGS

LAYER = "model.language_model.layers.{}."
Q_PROJ = (LAYER + "self_attn.q_proj").format(3)
GATE_PROJ = (LAYER + "mlp.gate_proj").format(0)
EXPERT = (LAYER + "mlp.experts.5.down_proj").format(2)
ROUTER = (LAYER + "mlp.gate").format(2)
SHARED = (LAYER + "mlp.shared_expert.up_proj").format(2)
IN_PROJ_A = (LAYER + "linear_attn.in_proj_a").format(1)
EMBEDDING, LM_HEAD, FC = "model.language_model.embed_tokens", "lm_head", "mtp.fc"
MTP_Q = "mtp.layers.0.self_attn.q_proj"


def claim(section: Any, module: str, beside: Any = None) -> Claim | None:
    """As the detector asks: by the name on disk, then by the canonical one."""
    config = QuantConfig({"quantization_config": section}, {"quantization": beside} if beside else {})
    return config.claim(module, module.removeprefix("model.language_model."))


def formats(section: Any, *modules: str, beside: Any = None) -> list[str | None]:
    found = [claim(section, module, beside) for module in modules]
    assert None not in found
    return [each.format for each in found if each is not None]


def test_without_a_config_nothing_is_claimed():
    assert claim(None, Q_PROJ) is None
    assert claim({}, Q_PROJ) is None
    assert claim({"ignore": [Q_PROJ]}, Q_PROJ) is None


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [IN_PROJ_A, "lm_head", EMBEDDING, "mtp.fc"],
}


class TestDeepseekV4:
    """The names of its first release, and the configs of three of them as they are."""

    def of(self, file: str, disk: str) -> tuple[str | None, str]:
        section = json.loads((CONFIGS / f"{file}_config.json").read_text())["quantization_config"]
        found = QuantConfig({"quantization_config": section}, {}).claim(
            disk, canonical(disk, NAMING, num_layers=43)
        )
        assert found is not None
        return found.format, found.rule

    def test_the_release_names_nothing_but_fp8(self):
        for file in ("deepseek-ai--DeepSeek-V4-Flash", "sgl-project--DeepSeek-V4-Flash-FP8"):
            for disk in ("layers.0.attn.wq_a", "layers.3.ffn.experts.7.w1", "mtp.0.e_proj"):
                assert self.of(file, disk) == ("fp8", "quant_method 'fp8'")
            for disk in ("embed", "head", "mtp.0.head"):
                assert self.of(file, disk) == (None, "fp8 quantises layers")

    def test_experts_that_modelopt_packed_anew(self):
        file = "nvidia--DeepSeek-V4-Flash-NVFP4"
        rule = "quantized_layers: layers.1.ffn.experts is NVFP4"
        assert self.of(file, "layers.1.ffn.experts.7.w1") == ("nvfp4", rule)
        assert self.of(file, "layers.11.ffn.experts.7.w1") == ("fp8", "quant_method 'fp8'")
        assert self.of(file, "layers.3.ffn.gate") == ("fp8", "quant_method 'fp8'")
        assert self.of(file, "mtp.0.ffn.experts.0.w1") == (None, "'mtp.*' is excluded")
        # Its list of what has no NVFP4 is not one of what is left in floats: the tensors decide.
        assert self.of(file, "layers.3.attn.wq_a") == (None, "'*.attn.*' is excluded")

    @pytest.mark.parametrize(
        ("pattern", "excluded"), [(r"re:.*mtp\..*", True), (r"re:.*mtp_block.*", False), ("mtp", True)]
    )
    def test_patterns_that_name_the_head_and_one_that_names_another(self, pattern, excluded):
        section = FP8 | {"ignore": [pattern]}
        disk = "mtp.0.ffn.experts.0.w1"
        found = QuantConfig({"quantization_config": section}, {}).claim(disk, canonical(disk, NAMING))
        assert found is not None and (found.format is None) == excluded


class TestFp8:
    def test_everything_but_the_list(self):
        found = formats(FP8, Q_PROJ, MTP_Q, IN_PROJ_A, FC, LM_HEAD, EMBEDDING)
        assert found == ["fp8", "fp8", None, None, None, None]

    def test_the_block_is_a_hint(self):
        found = claim(FP8, Q_PROJ)
        assert found is not None and found.hint["weight_block_size"] == [128, 128]

    def test_a_list_is_not_a_list_of_beginnings(self):
        """in_proj_a of layer 1 says nothing of in_proj_a of layer 10, nor of in_proj_ab."""
        other = (LAYER + "linear_attn.in_proj_a").format(10)
        assert formats(FP8, other, IN_PROJ_A + "b") == ["fp8", "fp8"]

    def test_embedding_and_output_are_left_alone_without_being_named(self):
        section = {"quant_method": "fp8"}
        assert formats(section, EMBEDDING, LM_HEAD, Q_PROJ) == [None, None, "fp8"]

    def test_a_whole_subtree(self):
        section = {"quant_method": "fp8", "modules_to_not_convert": ["mtp", "model.language_model.layers.3"]}
        assert formats(section, MTP_Q, FC, Q_PROJ, GATE_PROJ) == [None, None, None, "fp8"]

    def test_inside_text_config(self):
        config = QuantConfig({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, {})
        found = config.claim(Q_PROJ)
        assert found is not None and found.format == "fp8"


MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        Q_PROJ: {"quant_algo": "FP8"},
        GATE_PROJ: {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        (LAYER + "mlp.experts").format(2): {"quant_algo": "NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    },
    "ignore": ["mtp*", "mtp.layers.0*"],
}


class TestModelopt:
    def test_each_layer_has_its_own(self):
        found = formats(MIXED, Q_PROJ, GATE_PROJ, EXPERT, LM_HEAD)
        assert found == ["fp8", "nvfp4", "nvfp4", "nvfp4"]

    def test_what_is_not_listed_is_left_alone(self):
        assert formats(MIXED, IN_PROJ_A, ROUTER, EMBEDDING, FC, MTP_Q) == [None] * 5

    def test_wildcards(self):
        section = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "exclude_modules": ["lm_head", "*.mlp.shared_expert.*", "*self_attn*", "mtp.layers.0*"],
        }
        found = formats(section, LM_HEAD, SHARED, Q_PROJ, MTP_Q, FC, EXPERT, EMBEDDING)
        assert found == [None, None, None, None, "nvfp4", "nvfp4", None]

    def test_the_file_beside_counts_where_the_config_is_silent(self):
        beside = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        assert formats(None, Q_PROJ, LM_HEAD, beside=beside) == ["fp8", None]
        assert formats(MIXED, GATE_PROJ, beside=beside) == ["nvfp4"]

    def test_an_unknown_algorithm_is_told_as_it_is(self):
        assert formats({"quant_method": "modelopt", "quant_algo": "W3A5"}, Q_PROJ) == ["w3a5"]


INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}


class TestCompressedTensors:
    def section(self, targets: Any = ("Linear",), ignore: Any = (), **weights: Any) -> dict[str, Any]:
        group = {"targets": list(targets), "weights": INT4 | weights}
        return {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
        }

    @pytest.mark.parametrize(
        ("weights", "format"),
        [
            ({}, "int4"),
            ({"num_bits": 8}, "int8"),
            ({"num_bits": 8, "type": "float"}, "fp8"),
            ({"num_bits": 8, "type": "float", "scale_dtype": "torch.uint8"}, "mxfp8"),
            ({"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4"),
            ({"num_bits": 4, "type": "float"}, "mxfp4"),
            ({"num_bits": 3}, "int3"),
        ],
    )
    def test_formats_of_numbers(self, weights, format):
        found = claim(self.section(**weights), Q_PROJ)
        assert found is not None and found.format == format
        assert found.hint["bits"] == weights.get("num_bits", 4)
        assert found.hint["group_size"] == weights.get("group_size", 32)

    def test_activations_are_told(self):
        section = self.section(num_bits=8)
        group = section["config_groups"]["group_0"]
        for inputs, told in (
            ({"num_bits": 8, "type": "int", "dynamic": True}, "int8, dynamic"),
            ({"num_bits": 8, "type": "float", "dynamic": False}, "fp8, static"),
            (None, None),
        ):
            group["input_activations"] = inputs
            found = claim(section, Q_PROJ)
            assert found is not None and found.activations == told

    def test_ignored_by_name_and_by_pattern(self):
        section = self.section(ignore=["lm_head", IN_PROJ_A, "re:^mtp.*", r"re:.*mlp\.gate$"])
        assert formats(section, LM_HEAD, IN_PROJ_A, MTP_Q, FC, ROUTER) == [None] * 5
        assert formats(section, GATE_PROJ, Q_PROJ) == ["int4", "int4"]

    def test_targets_by_pattern(self):
        section = self.section(targets=["re:.*experts.*", "re:.*self_attn.q_proj"])
        assert formats(section, EXPERT, Q_PROJ, GATE_PROJ, FC) == ["int4", "int4", None, None]

    def test_a_pattern_is_more_than_a_class(self):
        section = self.section()
        group = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}}
        section["config_groups"]["group_1"] = group
        assert formats(section, Q_PROJ, GATE_PROJ) == ["fp8", "int4"]

    def test_an_embedding_is_no_linear(self):
        assert formats(self.section(), EMBEDDING) == [None]
        assert formats(self.section(targets=["re:.*embed_tokens"]), EMBEDDING) == ["int4"]

    def test_a_single_target_may_stand_without_a_list(self):
        section = self.section()
        section["config_groups"]["group_0"]["targets"] = "Linear"
        assert formats(section, Q_PROJ) == ["int4"]


QWEN = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "checkpoint_format": "gptq",
    "lm_head": False,
    "dynamic": {
        "lm_head": {},
        EMBEDDING: {},
        "-:.*attn.*": {},
        "-:.*shared_expert.*": {},
        "-:.*mtp.*": {},
        "-:.*visual.*": {},
    },
}


class TestGptq:
    def test_what_rules_exclude(self):
        assert formats(QWEN, Q_PROJ, IN_PROJ_A, SHARED, MTP_Q, FC) == [None] * 5
        assert formats(QWEN, EXPERT, GATE_PROJ) == ["gptq", "gptq"]

    def test_rules_without_a_sign_quantise_nothing_outside_layers(self):
        """Qwen's own name lm_head and the embedding among the rules, and leave both in bfloat16."""
        assert formats(QWEN, LM_HEAD, EMBEDDING) == [None, None]

    @pytest.mark.parametrize("rule", ["+:.*mtp.*", "+:mtp.*", ".*mtp.*"])
    def test_rules_that_claim_the_head(self, rule):
        section = {"quant_method": "gptq", "bits": 4, "dynamic": {rule: {"bits": 8, "group_size": 64}}}
        found = claim(section, FC)
        assert found is not None and found.format == "gptq" and repr(rule) in found.rule
        assert (found.hint["bits"], found.hint["group_size"]) == (8, 64)

    def test_the_first_rule_that_fits_decides(self):
        rules = {"-:.*q_proj": {}, "+:.*self_attn.*": {"bits": 8}}
        section = {"quant_method": "gptq", "bits": 4, "dynamic": rules}
        assert formats(section, Q_PROJ) == [None]
        found = claim(section, Q_PROJ.replace("q_proj", "k_proj"))
        assert found is not None and found.hint["bits"] == 8

    def test_rules_begin_at_the_beginning(self):
        section = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:mtp": {}, "-:q_proj": {}}}
        assert formats(section, FC, Q_PROJ) == [None, "gptq"]

    def test_a_rule_may_be_a_truth_value(self):
        section = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mtp.*": True, "-:.*attn.*": None}}
        assert formats(section, FC, Q_PROJ) == [None, None]

    def test_lm_head_by_its_own_key(self):
        section = {"quant_method": "gptq", "bits": 4}
        assert formats(section, LM_HEAD) == [None]
        assert formats(section | {"lm_head": True}, LM_HEAD, EMBEDDING) == ["gptq", None]
        ruled = section | {"lm_head": True, "dynamic": {"+:.*lm_head$": {"bits": 8}}}
        found = claim(ruled, LM_HEAD)
        assert found is not None and found.hint["bits"] == 8

    def test_the_version_is_a_hint(self):
        found = claim(QWEN | {"checkpoint_format": "gptq_v2"}, EXPERT)
        assert found is not None and found.hint["checkpoint_format"] == "gptq_v2"


class TestAwq:
    def test_the_list_names_parts_of_names(self):
        section = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["visual", "mtp", "linear_attn", "mlp.gate", "layers.3."],
        }
        assert formats(section, MTP_Q, FC, IN_PROJ_A, ROUTER, Q_PROJ) == [None] * 5
        assert formats(section, GATE_PROJ, SHARED, EXPERT) == ["awq", "awq", "awq"]

    def test_embedding_and_output_are_left_alone(self):
        section = {"quant_method": "awq", "modules_to_not_convert": None}
        assert formats(section, EMBEDDING, LM_HEAD, Q_PROJ) == [None, None, "awq"]


MLX_GATE = "language_model.model.layers.0.mlp.gate"
MLX = {"group_size": 64, "bits": 4, "mode": "affine", MLX_GATE: {"group_size": 32, "bits": 8}}


class TestMlx:
    @pytest.mark.parametrize("key", ["quantization", "quantization_config"])
    def test_one_entry_for_all_and_one_of_its_own(self, key):
        config = QuantConfig({key: MLX}, {})
        own, other = config.claim(MLX_GATE), config.claim(MLX_GATE.replace("gate", "up_proj"))
        assert own is not None and other is not None and own.format == other.format == "mlx"
        assert (own.hint["bits"], own.hint["group_size"]) == (8, 32)
        assert (other.hint["bits"], other.hint["group_size"]) == (4, 64)

    def test_false_leaves_a_module_alone(self):
        config = QuantConfig({"quantization": MLX | {"language_model.mtp.fc": False}}, {})
        found = config.claim("language_model.mtp.fc")
        assert found is not None and found.format is None


AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": False,
    "data_type": "int",
    "packing_format": "auto_round",
    "block_name_to_quantize": "model.language_model.layers",
    "extra_config": {Q_PROJ: {"bits": 16, "data_type": "float"}, r".*shared_expert\..*": {"bits": 8}},
}


class TestAutoRound:
    @pytest.mark.parametrize(
        ("packing", "format", "version"),
        [
            ("auto_round", "gptq", "gptq_v2"),
            ("auto_round:gptqmodel", "gptq", "gptq_v2"),
            ("auto_round:auto_gptq", "gptq", "gptq"),
            ("auto_round:gptq:exllamav2", "gptq", "gptq"),
            ("auto_round:auto_awq", "awq", None),
            ("auto_round:llm_compressor", "int4", "gptq_v2"),
        ],
    )
    def test_the_packing_says_how_zero_points_are_stored(self, packing, format, version):
        found = claim(AUTO_ROUND | {"packing_format": packing}, GATE_PROJ)
        assert found is not None and found.format == format
        assert found.hint.get("checkpoint_format") == version

    def test_what_is_left_alone_and_what_has_its_own_bits(self):
        assert formats(AUTO_ROUND, GATE_PROJ, EXPERT, Q_PROJ, MTP_Q, LM_HEAD) == [
            "gptq",
            "gptq",
            None,
            None,
            None,
        ]
        found = claim(AUTO_ROUND, SHARED)
        assert found is not None and (found.format, found.hint["bits"]) == ("gptq", 8)
        listed = AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 4}}}
        assert formats(listed, LM_HEAD) == ["gptq"]

    def test_floats(self):
        section = AUTO_ROUND | {"data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"}
        assert formats(section, GATE_PROJ) == ["mxfp4"]
        assert formats(section | {"data_type": "nv_fp"}, GATE_PROJ) == ["nvfp4"]


class TestQuark:
    SECTION: ClassVar = {
        "quant_method": "quark",
        "exclude": ["lm_head", "re:.*linear_attn.*"],
        "global_quant_config": {
            "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
            "input_tensors": {"dtype": "fp8_e4m3"},
        },
        "layer_quant_config": {"*shared_expert*": {"weight": {"dtype": "fp4"}}},
    }

    def test_everything_but_the_list(self):
        found = formats(self.SECTION, Q_PROJ, IN_PROJ_A, LM_HEAD, EMBEDDING, SHARED)
        assert found == ["fp8", None, None, None, "mxfp4"]
        told = claim(self.SECTION, Q_PROJ)
        assert told is not None and told.activations == "fp8_e4m3"


class TestBitsandbytes:
    def test_four_bits_and_eight(self):
        section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        section["llm_int8_skip_modules"] = ["mtp"]
        assert formats(section, Q_PROJ, FC, LM_HEAD, EMBEDDING) == ["nf4", None, None, None]
        assert formats({"quant_method": "bitsandbytes", "load_in_8bit": True}, Q_PROJ) == ["int8"]


class TestQuantizeConfig:
    """quantize_config.json, in which GPTQ's tools wrote what config.json says now."""

    OLDER: ClassVar = {"bits": 4, "group_size": 128, "sym": False, "checkpoint_format": "gptq_v2"}

    def asked(self, section: Any, older: Any) -> Any:
        found = QuantConfig({"quantization_config": section}, {}, older).claim(Q_PROJ)
        assert found is not None
        return found.hint.get("checkpoint_format"), found.hint.get("writer")

    def test_it_counts_where_config_json_is_silent(self):
        assert self.asked(None, self.OLDER) == ("gptq_v2", None)
        assert self.asked({"quant_method": "gptq", "bits": 4}, self.OLDER) == ("gptq_v2", None)

    def test_two_that_name_one_each_decide_nothing(self):
        section = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}
        assert self.asked(section, self.OLDER) == ("gptq or gptq_v2", None)
        assert self.asked(section, section) == ("gptq", None)

    def test_who_wrote_it(self):
        section = {"quant_method": "gptq", "bits": 4, "meta": {"quantizer": ["gptqmodel:2.0.0"]}}
        assert self.asked(section, {}) == (None, "gptqmodel")
        assert self.asked({"quant_method": "gptq"}, self.OLDER | section)[1] == "gptqmodel"


class TestTorchao:
    SECTION: ClassVar[dict[str, Any]] = {
        "quant_method": "torchao",
        "quant_type": {
            "default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"group_size": None}}
        },
        "include_input_output_embeddings": False,
        "modules_to_not_convert": ["mtp"],
    }

    def test_linears_in_layers(self):
        assert formats(self.SECTION, Q_PROJ, EMBEDDING, LM_HEAD, FC) == ["torchao", None, None, None]
        with_more = self.SECTION | {"include_input_output_embeddings": True}
        assert formats(with_more, Q_PROJ, EMBEDDING, LM_HEAD) == ["torchao"] * 3

    def test_modules_of_their_own(self):
        own = {
            "_type": "FqnToConfig",
            "_data": {"fqn_to_config": {Q_PROJ: None, "_default": {}, EXPERT: {"_type": "x"}}},
        }
        section = self.SECTION | {"quant_type": {"default": own}}
        assert formats(section, Q_PROJ, EXPERT, GATE_PROJ) == [None, "torchao", "torchao"]


def test_gptqmodel_has_a_list_of_its_own():
    section = {"quant_method": "gptq", "bits": 4, "meta": {"quantizer": ["gptqmodel:7.6.0"]}}
    assert [
        found.or_floats for found in (claim(section, ROUTER), claim({**section, "meta": {}}, ROUTER)) if found
    ] == [
        True,
        False,
    ]
    ruled = claim(section | {"dynamic": {f"+:{GATE_PROJ}": {"bits": 8}}}, GATE_PROJ)
    assert ruled is not None and not ruled.or_floats


def test_modelopt_per_channel_and_per_token():
    found = claim({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, Q_PROJ)
    assert found is not None and (found.format, found.activations) == ("fp8", "FP8_PER_CHANNEL_PER_TOKEN")
    small = claim({"quant_method": "modelopt", "quant_algo": "mxfp4"}, Q_PROJ)  # as modelopt 0.47 writes it
    assert small is not None and (small.format, small.activations) == ("mxfp4", "mxfp4")
    weights_only = claim({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, Q_PROJ)
    assert weights_only is not None and (weights_only.format, weights_only.activations) == ("int4", None)
