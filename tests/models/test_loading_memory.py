"""Loading a whole model takes no more memory than the loaded model and its largest tensor."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from headlong.checkpoint.load import Expectations
from headlong.layers.weights import Scope
from headlong.models import registry
from headlong.ops.registry import Ops

MB = 1 << 20
SLACK = 24 * MB  # the reader's staging buffer, and what Python and torch hold besides
CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 24576,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "tie_word_embeddings": False,
}
LOAD = """
import gc, sys, torch
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.engine.build import build, survey

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

blueprint = survey(Checkpoint.open(sys.argv[1]))
# Warm-up: the probe of each weight shape is measured once per process and is not the loading.
from headlong.ops.linear import invariance
invariance.find_tile = lambda *shape: 4
from headlong.ops import registry
registry.find_tile = invariance.find_tile
before = status("VmRSS")
built = build(blueprint, device=torch.device("cpu"), dtype=getattr(torch, sys.argv[2]))
gc.collect()
print(status("VmHWM") - before, status("VmRSS") - before)
"""


def write_random(folder):
    """A checkpoint with every tensor its model asks for, head included; returns the largest tensor's bytes."""
    architecture = registry.find(CONFIG)
    config, wanted = architecture.parse(CONFIG), Expectations(())
    dry = Scope(wanted, Ops(torch.float32, torch.device("meta")))
    architecture.model(config, dry)
    architecture.head(config, dry("mtp"))
    tensors = {
        name if name.startswith(("mtp.", "lm_head.")) else f"model.{name}": torch.randn(shape).bfloat16()
        for name, shape in wanted.expected.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return max(tensor.nbytes for tensor in tensors.values())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1), ("float32", 2)])
def test_peak_is_the_model_and_its_largest_tensor(tmp_path, dtype, factor):
    largest = write_random(tmp_path) * factor
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    peak, loaded = map(int, run.stdout.split())
    print(f"peak {peak / MB:.0f} MB, loaded {loaded / MB:.0f} MB, largest tensor {largest / MB:.0f} MB")
    assert loaded > 150 * MB * factor
    assert peak <= loaded + largest + SLACK
