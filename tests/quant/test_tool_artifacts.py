"""What tools really write: one small matrix of each, read as the tool itself unpacks it and told as its config says.

The files in tests/data/tools are made by `release/artifacts.py --reduce`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from headlong.checkpoint.detect import agrees
from headlong.checkpoint.quant_config import QuantConfig
from headlong.errors import CheckpointError
from headlong.quant.detect import detect
from support.packing import header

TOOLS = sorted((Path(__file__).parent.parent / "data" / "tools").glob("*.safetensors"))


def test_there_are_tools():
    wrote = {file.name.partition("-")[0] for file in TOOLS}
    assert wrote == {
        *("bitsandbytes", "llmcompressor", "mlx", "auto_round"),
        *("modelopt", "gptqmodel", "torchao", "quark"),
    }


@pytest.mark.parametrize("file", TOOLS, ids=lambda file: file.stem)
def test_a_matrix_that_a_tool_wrote(file):
    with safe_open(file, "pt") as stored:
        parts = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
        said = stored.metadata()
    meant = parts.pop("meant").float()
    claim = QuantConfig(json.loads(said["config"]), json.loads(said["beside"])).claim(said["module"])
    assert claim is not None
    found = detect(header(parts), tuple(meant.shape), claim.hint)
    assert found.label == said["label"] and agrees(claim.format, found)
    values = found.pack(parts, tuple(meant.shape)).dequantize(0, len(meant))
    # Tools unpack in bfloat16 or float16, and scales may be stored with fewer bits than they computed with.
    far = (values - meant).abs() > 2**-7 * meant.abs() + 2**-10 * meant.abs().max()
    # modelopt rounds once more as it writes, with other scales, so a few weights are a step off.
    assert far.float().mean() <= (0.001 if file.stem.startswith("modelopt-INT4") else 0.0)


METHODS = (
    "fp8",
    "gptq",
    "awq",
    "compressed-tensors",
    "bitsandbytes",
    "mxfp4",
    "quark",
    "torchao",
    "modelopt",
)
PACKINGS = ("gptq", "gptq_v2", "auto_round", "auto_round:auto_gptq", "auto_round:auto_awq", "pack-quantized")
OTHERS: dict[str, tuple[Any, ...]] = {
    "bits": (2, 3, 4, 8),
    "group_size": (16, 32, 64, 128, -1),
    **dict.fromkeys(("checkpoint_format", "format", "packing_format"), PACKINGS),
}


def other_configs(section: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A section with one entry less, with another value there, none at all, and other tools' names."""
    yield {}
    for method in METHODS:
        yield {"quant_method": method}
    for key, value in section.items():
        yield {name: entry for name, entry in section.items() if name != key}
        for other in (not value,) if isinstance(value, bool) else OTHERS.get(key, ()):
            yield {**section, key: other}


@pytest.mark.parametrize("file", TOOLS, ids=lambda file: file.stem)
def test_no_other_config_makes_garbage_of_it(file):
    """Whatever a config says or leaves out, a matrix is read as the tool meant it, or refused."""
    with safe_open(file, "pt") as stored:
        parts = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
        said = stored.metadata()
    meant = parts.pop("meant").float()
    shape, close = tuple(meant.shape), 2**-6 * meant.abs().max()
    section = json.loads(said["config"])["quantization_config"] or json.loads(said["beside"])["quantization"]
    read = 0
    for other in other_configs(section):
        claim = QuantConfig({"quantization_config": other}, {}).claim(said["module"])
        try:
            found = detect(header(parts), shape, {} if claim is None else claim.hint)
            values = found.pack(parts, shape).dequantize(0, shape[0])
        except CheckpointError:
            continue
        read += 1
        far = (values - meant).abs() > close
        assert far.float().mean() < 0.001, f"{other} is read as {found.label}"
    assert read >= 1
