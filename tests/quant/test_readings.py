"""Tensors that can be read in two ways: the evidence that decides, and a refusal where there is none."""

import json

import pytest
import torch
from torch import Tensor

from headlong.checkpoint.quant_config import QuantConfig
from headlong.errors import CheckpointError
from headlong.quant.awq_gemv import AwqGemvFormat
from headlong.quant.detect import detect
from headlong.quant.format import Part
from headlong.quant.gptq import GptqFormat
from support.packing import header, hint_of, pack
from support.packing_libraries import STATE

SHAPE = (16, 64)
MODULE = "model.layers.0.mlp.up_proj"
ASYMMETRIC = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}


def drawn(shape: tuple[int, int] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def compressed(weights: dict) -> dict:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def hint(section: dict) -> dict:
    claim = QuantConfig({"quantization_config": section}, {}).claim(MODULE)
    assert claim is not None
    return dict(claim.hint)


TORCHAO = {"_type": "IntxWeightOnlyConfig", "_data": {"mapping_type": {"_data": "ASYMMETRIC"}}}
WITHOUT_ZEROS = {
    "int4_g32": compressed(ASYMMETRIC),
    "int8_channel": compressed(ASYMMETRIC | {"num_bits": 8}),
    "unrounded_int4": compressed(ASYMMETRIC),
    "int4_g64": {"quant_method": "auto-round", "packing_format": "llm_compressor", "bits": 4, "sym": False},
    "quark_uint4": {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "uint4", "symmetric": False}},
        "export": {"pack_method": "reorder"},
    },
    "torchao_int8": {"quant_method": "torchao", "quant_type": {"default": TORCHAO}},
}


@pytest.mark.parametrize("how", WITHOUT_ZEROS)
def test_zero_points_that_a_config_promises(how):
    """Without them the same codes would be read as symmetric ones."""
    parts = header(pack(drawn(), how))
    zeros = [name for name in parts if "zero_point" in name]
    parts = {name: part for name, part in parts.items() if name not in zeros}
    said = hint(WITHOUT_ZEROS[how])
    with pytest.raises(CheckpointError, match=r"zero_point is missing, and the config says .* not symmetric"):
        detect(parts, SHAPE, said)
    assert detect(parts, SHAPE, said | {"symmetric": True}).whole_numbers


@pytest.mark.parametrize("how", ["gptq_v1", "int4_g32"])
def test_groups_in_the_order_of_activations(how):
    """Without the list of each column's group the columns would be taken in runs."""
    parts = header(pack(drawn((16, 256)), how))
    parts.pop("g_idx", None)
    gptq = {"quant_method": "gptq", "bits": 4, "desc_act": True}
    ordered = gptq if how == "gptq_v1" else compressed(ASYMMETRIC | {"symmetric": True, "actorder": "group"})
    with pytest.raises(
        CheckpointError, match=r"g_idx is missing, and the config says .* order of activations"
    ):
        detect(parts, (16, 256), hint(ordered))
    runs = gptq | {"desc_act": False}
    runs = runs if how == "gptq_v1" else compressed(ASYMMETRIC | {"symmetric": True, "actorder": "static"})
    assert detect(parts, (16, 256), hint(runs)).whole_numbers


def test_one_group_needs_no_order():
    parts = header(pack(drawn((16, 64)), "gptq_v1"))
    del parts["g_idx"]
    assert (
        detect(parts, (16, 64), {"desc_act": True, "checkpoint_format": "gptq"}).label == "gptq int4 channel"
    )


@pytest.mark.parametrize(
    ("how", "scale"),
    [
        ("fp8_channel", "weight_scale"),
        ("fp8_block", "weight_scale_inv"),
        ("nvfp4_modelopt", "weight_scale_2"),
        ("nvfp4_compressed", "weight_global_scale"),
    ],
)
def test_a_scale_that_is_the_inverse_of_what_its_name_says(how, scale):
    """The names say which multiply and which divide; values that would make absurd weights contradict them."""
    parts = pack(drawn(), how)
    found = detect(header(parts), SHAPE, {})
    assert found.pack(parts, SHAPE).dequantize(0, SHAPE[0]).abs().max() < 10
    with pytest.raises(CheckpointError, match=rf"{scale} (multiplies|divides) here and would make weights"):
        found.pack(parts | {scale: 1 / parts[scale]}, SHAPE)


def test_global_scales_under_each_others_names():
    for how, own, other in (
        ("nvfp4_modelopt", "weight_scale_2", "weight_global_scale"),
        ("nvfp4_compressed", "weight_global_scale", "weight_scale_2"),
    ):
        parts = header(pack(drawn(), how))
        parts[other] = parts.pop(own)
        with pytest.raises(CheckpointError, match=f"{own} is missing"):
            detect(parts, SHAPE, {})


def test_floats_of_another_kind():
    """e4m3fnuz has half the numbers of e4m3, and its largest is NaN there."""
    weight = drawn()
    scale = weight.abs().amax(1, keepdim=True) / 240
    codes = (weight / scale).to(torch.float8_e4m3fnuz).view(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale": scale}
    found = detect(header(parts), SHAPE, {})
    with pytest.raises(CheckpointError, match="NaN and no minus zero: it is in e4m3fnuz"):
        found.pack(parts, SHAPE)
    codes.view(torch.uint8)[3, 3] = 0x80  # which e4m3fnuz has for NaN alone
    found.pack(parts, SHAPE)
    with pytest.raises(CheckpointError, match="F8_E4M3FNUZ"):
        detect({"weight": Part("F8_E4M3FNUZ", SHAPE), "weight_scale": Part("F32", (16, 1))}, SHAPE, {})


def test_gptq_and_the_second_layout_of_awq_with_the_same_shapes():
    """Eight inputs to an output, in groups of eight."""
    shape = (64, 512)
    parts = {
        "qweight": Part("I32", (64, 64)),
        "qzeros": Part("I32", (64, 8)),
        "scales": Part("F16", (64, 64)),
    }
    said = {"group_size": 8, "bits": 4}
    assert isinstance(detect(parts, shape, said | {"method": "gptq"}), GptqFormat)
    assert isinstance(detect(parts, shape, said | {"method": "awq"}), AwqGemvFormat)
    with pytest.raises(CheckpointError, match=r"is GPTQ's or AWQ's \(GEMV\): give `quant_method`"):
        detect(parts, shape, said)


def test_words_that_two_widths_fill():
    parts = {
        "weight_packed": Part("I32", (16, 1)),
        "weight_scale": Part("BF16", (16, 1)),
        "weight_shape": Part("I64", (2,)),
    }
    assert detect(parts, (16, 8), {"bits": 4}).label == "int4 channel"
    assert detect(parts, (16, 8), {"bits": 2}).label == "int2 channel"
    with pytest.raises(CheckpointError, match="1 words hold 8 codes of 2 bits or of 4: give `bits`"):
        detect(parts, (16, 8), {})


@pytest.mark.parametrize(("said", "words"), [(3, 4), (5, 6), (6, 7)])
def test_codes_that_once_did_not_cross_words(said, words):
    """Ten codes of 3 bits to a word fill as many words as eight of 4 bits."""
    parts = {
        "weight_packed": Part("I32", (16, words)),
        "weight_scale": Part("BF16", (16, 1)),
        "weight_shape": Part("I64", (2,)),
    }
    with pytest.raises(CheckpointError, match=f"bits by its shape and {said} by the config"):
        detect(parts, (16, 32), {"bits": said})
    assert detect(parts, (16, 32), {}).label == f"int{words} channel"


def test_largest_magnitudes_without_what_is_added_to_them():
    parts = pack(drawn(), "nf4_nested")
    name = f"{STATE}nf4"
    state = json.loads(bytes(parts[name].tolist()))
    del state["nested_offset"]
    parts[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="nested_offset None, which must be a number"):
        detect(header(parts), SHAPE, {}).pack(parts, SHAPE)


@pytest.mark.parametrize("left_out", ["blocksize", "quant_type", "shape"])
def test_what_bitsandbytes_always_says(left_out):
    """A few codes fill as many blocks of several sizes."""
    parts = pack(drawn(), "nf4")
    state = json.loads(bytes(parts[f"{STATE}nf4"].tolist()))
    del state[left_out]
    parts[f"{STATE}nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=f"says {left_out} None where tensors say"):
        detect(header(parts), SHAPE, {}).pack(parts, SHAPE)


def test_bytes_of_scales_are_powers_of_two_or_floats_by_their_number():
    """MLX stores both as bytes: a power of two for 32 columns, an e4m3 float for 16."""
    labels = {how: detect(header(pack(drawn(), how)), SHAPE, {}).label for how in ("mxfp4_mlx", "nvfp4_mlx")}
    assert labels == {"mxfp4_mlx": "mxfp4", "nvfp4_mlx": "nvfp4"}
    parts = header(pack(drawn(), "mxfp4_mlx")) | {"scales": Part("U8", (16, 8))}
    with pytest.raises(CheckpointError):
        detect(parts, SHAPE, {})


@pytest.mark.parametrize("how", ["gptq_v1", "awq", "mlx4"])
def test_no_zero_points_where_the_format_has_them(how):
    parts = header(pack(drawn((64, 64)), how))
    del parts["biases" if how == "mlx4" else "qzeros"]
    with pytest.raises(CheckpointError, match=r"(qzeros is|biases are) missing"):
        detect(parts, (64, 64), hint_of(how))


ROTATED = {
    "transform_config: location 'input'": compressed(ASYMMETRIC)
    | {
        "transform_config": {
            "config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input", "targets": ["x"]}]}}
        }
    },
    "rotation": {"quant_method": "gptq", "meta": {"rotation": "hadamard"}},
    "rotation_config": {"quant_method": "auto-round", "rotation_config": {"hadamard_type": "hadamard"}},
    "algo_config: r4": {
        "quant_method": "quark",
        "algo_config": [{"name": "rotation", "r1": True, "r4": True}],
    },
    "algo_config: online_r1_rotation": {
        "quant_method": "quark",
        "algo_config": [{"name": "rotation", "r1": True, "online_r1_rotation": True}],
    },
}
AS_THEY_ARE = (
    compressed(ASYMMETRIC) | {"transform_config": {}},
    compressed(ASYMMETRIC)
    | {"transform_config": {"config_groups": {"R1": {"apply": [{"location": "weight_input"}]}}}},
    {"quant_method": "quark", "algo_config": [{"name": "rotation", "r1": True, "r4": False}]},
    {"quant_method": "quark", "algo_config": None},
    {"quant_method": "gptq", "meta": {"rotation": None}},
    {"quant_method": "fp8", "transform_config": 7, "algo_config": 5},
)


@pytest.mark.parametrize("place", ROTATED)
def test_inputs_that_the_config_says_are_rotated(place):
    assert QuantConfig({"quantization_config": ROTATED[place]}, {}).rotation == place


@pytest.mark.parametrize("section", AS_THEY_ARE)
def test_rotations_that_are_part_of_the_weights(section):
    assert QuantConfig({"quantization_config": section}, {}).rotation is None
