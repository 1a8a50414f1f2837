"""Every pair of readings that docs/checkpoints.md names has tests: of the evidence that decides, and of a refusal."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent.parent / "docs" / "checkpoints.md"
PAIRS = {
    "GPTQ's zero points, less one or not": {
        "test_zero_points.py": (
            "test_values_decide_whatever_the_config_leaves_open",
            "test_a_config_that_the_values_contradict",
            "test_the_config_decides_where_values_cannot",
        )
    },
    "a stored zero point of the largest value (0 less one)": {
        "test_zero_points.py": (
            "test_a_zero_point_of_zero_that_gptqmodel_stored",
            "test_a_zero_point_of_zero_that_nobody_says_how_it_was_stored",
        )
    },
    "groups or FP8 blocks that cut columns evenly or by a power of two": {
        "test_gptq.py": ("test_a_group_that_could_be_two",),
        "test_fp8.py": ("test_blocks_that_could_be_of_two_sizes",),
    },
    "the same shapes in another layout (`gptq_p`, seven bits a byte apart)": {
        "test_zero_points.py": ("test_layouts_with_the_same_shapes_are_refused_by_name",),
        "test_refused_values.py": ("test_seven_bits_that_lie_as_eight_do",),
    },
    "floats with scales: to be rounded or not": {
        "test_refused_values.py": ("test_floats_with_scales_need_a_config",)
    },
    "Quark's four bits: below zero or not, in AWQ's order or not": {
        "test_refused_values.py": ("test_codes_of_quark_need_a_config",)
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
