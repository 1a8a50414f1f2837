"""What tools really write: one small matrix of each, read as the tool itself unpacks it and told as its config says.

The files in tests/data/tools are made by `release/artifacts.py --reduce`.
"""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from headlong.checkpoint.detect import agrees
from headlong.checkpoint.quant_config import QuantConfig
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
