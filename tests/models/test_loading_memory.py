"""Loading takes no more memory than the loaded model and its largest tensor; packed models stay packed."""

import json
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headlong.checkpoint.load import Expectations
from headlong.layers.weights import Scope
from headlong.models import qwen3_5, registry
from headlong.ops import native
from headlong.ops.registry import choose_backend
from headlong.quant import rtn
from headlong.quant.gguf import BLOCK_SIZES

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
from headlong.config import EngineConfig
from headlong.engine.build import build, survey

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

blueprint = survey(Checkpoint.open(sys.argv[1]), EngineConfig(dtype=sys.argv[2]))
# Warm-up: the probe of each weight shape is measured once per process and is not the loading.
from headlong.ops.linear import invariance
invariance.find_tile = lambda *shape: 4
from headlong.ops import registry
registry.find_tile = invariance.find_tile
before = status("VmRSS")
built = build(blueprint, device=torch.device("cpu"))
gc.collect()
print(status("VmHWM") - before, status("VmRSS") - before)
"""


def needs():
    """All that the model and its head ask for."""
    family = registry.find(CONFIG)
    config, wanted = family.config(CONFIG), Expectations(())
    dry = Scope(wanted, choose_backend(torch.float32, torch.device("meta")))
    family.model(config, dry)
    family.head(config, dry("mtp"))
    return wanted.expected


def write(folder, kind=None):
    """A random checkpoint with its head, matrices of layers packed as `kind`; returns the largest tensor's bytes."""
    tensors = {}
    for name, need in needs().items():
        disk = name if name.startswith(("mtp.", "lm_head.")) else f"model.{name}"
        weight = torch.randn(need.shape)
        if kind is None or need.role != "matrix" or "layers." not in name:
            tensors[disk] = weight.bfloat16()
        else:
            _, parts = rtn.quantize(weight.bfloat16(), kind)
            tensors |= {disk.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return max(tensor.nbytes for tensor in tensors.values())


def measure(path, dtype):
    """(peak, loaded): what loading adds to a process, in bytes."""
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    peak, loaded = map(int, run.stdout.split())
    print(f"peak {peak / MB:.0f} MB, loaded {loaded / MB:.0f} MB")
    return peak, loaded


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_peak_is_the_model_and_its_largest_tensor(tmp_path, dtype):
    """Native products take bfloat16 as it is stored; others have it widened."""
    factor = 2 if dtype == "float32" and native.library() is None else 1
    largest = write(tmp_path) * factor
    peak, loaded = measure(tmp_path, dtype)
    assert loaded > 150 * MB * factor
    assert peak <= loaded + largest + SLACK


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("fp8", marks=pytest.mark.slow),
        "fp8_block",
        pytest.param("int8", marks=pytest.mark.slow),
        "int4",
    ],
)
def test_a_packed_model_takes_what_its_file_takes(tmp_path, kind):
    largest = write(tmp_path, kind)
    size = (tmp_path / "model.safetensors").stat().st_size
    peak, loaded = measure(tmp_path, "auto")
    assert 0.9 * size < loaded <= 1.2 * size
    assert peak <= loaded + largest + SLACK


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_a_gguf_takes_what_its_file_takes(tmp_path, kind):
    path = tmp_path / "model.gguf"
    write_gguf(path, kind)
    size = path.stat().st_size
    peak, loaded = measure(path, "auto")
    assert 0.9 * size < loaded <= 1.2 * size
    assert peak <= 1.2 * size + SLACK


def write_gguf(path, kind):
    """Random blocks in every matrix, the embedding's too."""
    writer = gguf.GGUFWriter(path, "qwen35")
    for key, value in registry.gguf_metadata(CONFIG, head_layers=1).items():
        if key != "general.architecture":
            writer.add_key_value(key, value, _value_type(value), *_element_type(value))
    elements, nbytes = BLOCK_SIZES[kind]
    generator = np.random.default_rng(0)
    spec = qwen3_5.DENSE.gguf
    assert spec is not None
    for name, need in needs().items():
        disk = spec.names.disk(name, CONFIG["num_hidden_layers"])
        if need.role == "matrix":
            shape = (need.shape[0], need.shape[1] // elements * nbytes)
            # Bytes below 64 never make a half-precision scale that is not finite.
            blocks = generator.integers(0, 64, shape, dtype=np.uint8)
            writer.add_tensor(disk, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            shape = spec.names.transform(name).disk_shape(need.shape)
            sign = -1 if name.endswith("A_log") else 1
            writer.add_tensor(disk, sign * np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _value_type(value):
    return gguf.GGUFValueType.ARRAY if isinstance(value, list) else gguf.GGUFValueType.get_type(value)


def _element_type(value):
    return [gguf.GGUFValueType.get_type(value[0])] if isinstance(value, list) else []
