"""Every pair of readings that docs/checkpoints.md names has tests: of the evidence that decides, and of a refusal."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
DOCS = TESTS.parent / "docs" / "checkpoints.md"
READINGS, ORDERS = "quant/test_readings.py", "models/test_stored_orders.py"
PAIRS = {
    "GPTQ's zero points, less one or not": {
        "quant/test_zero_points.py": (
            "test_values_decide_whatever_the_config_leaves_open",
            "test_a_config_that_the_values_contradict",
            "test_the_config_decides_where_values_cannot",
        )
    },
    "a stored zero point of the largest value (0 less one)": {
        "quant/test_zero_points.py": (
            "test_a_zero_point_of_zero_that_gptqmodel_stored",
            "test_a_zero_point_of_zero_that_nobody_says_how_it_was_stored",
        )
    },
    "groups or FP8 blocks that cut columns evenly or by a power of two": {
        "quant/test_gptq.py": ("test_a_group_that_could_be_two",),
        "quant/test_fp8.py": ("test_blocks_that_could_be_of_two_sizes",),
    },
    "the same shapes in another layout (`gptq_p`, seven bits a byte apart)": {
        "quant/test_zero_points.py": ("test_layouts_with_the_same_shapes_are_refused_by_name",),
        "quant/test_refused_values.py": ("test_seven_bits_that_lie_as_eight_do",),
    },
    "floats with scales: to be rounded or not": {
        "quant/test_refused_values.py": ("test_floats_with_scales_need_a_config",)
    },
    "Quark's four bits: below zero or not, in AWQ's order or not": {
        "quant/test_refused_values.py": ("test_codes_of_quark_need_a_config",)
    },
    "codes with zero points or without": {
        READINGS: (
            "test_zero_points_that_a_config_promises",
            "test_no_zero_points_where_the_format_has_them",
        )
    },
    "columns in runs of groups or in groups of their own": {
        READINGS: ("test_groups_in_the_order_of_activations", "test_one_group_needs_no_order")
    },
    "GPTQ or AWQ (GEMV), of the same shapes at eight inputs to an output": {
        READINGS: ("test_gptq_and_the_second_layout_of_awq_with_the_same_shapes",)
    },
    "codes of two widths that fill the same words": {
        READINGS: ("test_words_that_two_widths_fill", "test_codes_that_once_did_not_cross_words")
    },
    "a scale that multiplies or its inverse (FP8, NVFP4's global one)": {
        READINGS: (
            "test_a_scale_that_is_the_inverse_of_what_its_name_says",
            "test_global_scales_under_each_others_names",
        )
    },
    "e4m3 or e4m3fnuz": {READINGS: ("test_floats_of_another_kind",)},
    "bytes of scales: powers of two or e4m3 (MLX)": {
        READINGS: ("test_bytes_of_scales_are_powers_of_two_or_floats_by_their_number",),
        "quant/test_refused_values.py": ("test_a_mode_of_mlx_that_the_parts_are_not_of",),
    },
    "nf4 or fp4, largest magnitudes with an offset or without": {
        READINGS: (
            "test_largest_magnitudes_without_what_is_added_to_them",
            "test_what_bitsandbytes_always_says",
        ),
        "quant/test_refused_values.py": ("test_values_that_cannot_be",),
    },
    "inputs as they are or rotated as the model runs": {
        READINGS: (
            "test_inputs_that_the_config_says_are_rotated",
            "test_rotations_that_are_part_of_the_weights",
        ),
        ORDERS: ("test_rotated_inputs_are_refused",),
    },
    "norms around zero or one (MLX)": {ORDERS: ("test_norms_around_zero_or_one",)},
    "experts inputs first or outputs first, gates and ups by turns or not": {
        ORDERS: (
            "test_experts_with_inputs_and_outputs_the_other_way_round",
            "test_gates_and_ups_of_a_release_that_takes_turns",
        )
    },
    "rotary pairs or halves, value heads grouped or tiled (GGUF)": {
        "models/test_gguf_names.py": (
            "test_rotary_rows_turn_the_same_way",
            "test_tiled_value_heads",
            "test_absurd_counts",
        )
    },
}


def documented() -> list[str]:
    _, _, table = DOCS.read_text().partition("| two readings | evidence |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    return [row.split("|")[1].strip() for row in rows]


def test_all_that_are_documented_are_here():
    assert documented() == list(PAIRS)


@pytest.mark.parametrize("pair", PAIRS)
def test_each_has_its_tests(pair):
    for file, names in PAIRS[pair].items():
        defined = {
            node.name
            for node in ast.parse((TESTS / file).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        assert set(names) <= defined
