"""What model code sees: dry run, verification that lists everything, loading, and its memory."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.load import Expectations, WeightLoader, verify
from headlong.checkpoint.names import NameMap
from headlong.checkpoint.source import EMBEDDED
from headlong.errors import CheckpointError, HeadError

GATE_UP = "layers.0.mlp.experts.gate_up_proj"
DOWN = "layers.0.mlp.experts.down_proj"


def open_with(folder, tensors: dict) -> tuple[Checkpoint, NameMap]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    return checkpoint, NameMap(checkpoint)


def loader(checkpoint, names, dtype=torch.float32, **kwargs) -> WeightLoader:
    return WeightLoader(checkpoint, names, dtype, "cpu", **kwargs)


def split_experts(gate_up: torch.Tensor, down: torch.Tensor) -> dict:
    """The same experts as they are stored one by one."""
    parts = {}
    for e in range(len(gate_up)):
        gate, up = gate_up[e].chunk(2)
        for kind, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[e])):
            parts[f"model.layers.0.mlp.experts.{e}.{kind}.weight"] = tensor.contiguous()
    return parts


def test_expectations_record_and_allocate_nothing():
    source = Expectations({"a", "b"}, torch.bfloat16)
    tensor = source.get("a", 10**6, 10**6)
    assert tensor.is_meta and tensor.dtype is torch.bfloat16
    assert source.get("s", dtype=torch.float32).dtype is torch.float32
    assert source.expected == {"a": (10**6, 10**6), "s": ()}
    assert source.has("b") and not source.has("c")
    source.get("a", 10**6, 10**6)
    with pytest.raises(AssertionError, match="a is asked for"):
        source.get("a", 3)


def test_loader_converts_checks_and_reports(tmp_path):
    weight = torch.randn(4, 8)
    checkpoint, names = open_with(tmp_path, {"model.a": weight, "model.s": torch.tensor(2.0)})
    seen = []
    source = loader(checkpoint, names, torch.bfloat16, progress=lambda *args: seen.append(args))
    got = source.get("a", 4, 8)
    assert got.dtype is torch.bfloat16 and torch.equal(got, weight.bfloat16())
    assert torch.equal(source.get("a", 4, 8, dtype=torch.float32), weight)
    assert source.get("s").shape == ()
    assert seen == [("load weights", 128, 132), ("load weights", 132, 132), ("load weights", 132, 132)]
    assert source.has("a") and not source.has("model.a")
    with pytest.raises(CheckpointError, match=r"'a': expected \[8, 4\], found \[4, 8\] on disk \(model.a\)"):
        source.get("a", 8, 4)
    with pytest.raises(CheckpointError, match="'b' is missing"):
        source.get("b", 1)


def test_progress_counts_only_what_is_wanted(tmp_path):
    checkpoint, names = open_with(tmp_path, {"model.a": torch.ones(4), "mtp.b": torch.ones(4)})
    seen = []
    source = loader(checkpoint, names, progress=lambda *args: seen.append(args), label="x", wanted=["a"])
    source.get("a", 4)
    assert seen == [("x", 16, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_fused_and_one_by_one_are_equal(tmp_path, dtype):
    gate_up, down = torch.randn(5, 6, 4), torch.randn(5, 4, 3)
    fused = open_with(tmp_path / "fused", {f"model.{GATE_UP}": gate_up, f"model.{DOWN}": down})
    parts = open_with(tmp_path / "parts", split_experts(gate_up, down))
    for checkpoint, names in (fused, parts):
        seen = []
        source = loader(checkpoint, names, dtype, progress=lambda *args, seen=seen: seen.append(args))
        assert torch.equal(source.get(GATE_UP, 5, 6, 4), gate_up.to(dtype))
        assert torch.equal(source.get(DOWN, 5, 4, 3), down.to(dtype))
        assert seen[-1][1] == seen[-1][2] == checkpoint.nbytes
        verify({GATE_UP: (5, 6, 4), DOWN: (5, 4, 3)}, names, checkpoint)


def test_incomplete_experts_are_not_loaded(tmp_path):
    parts = split_experts(torch.randn(3, 4, 2), torch.randn(3, 2, 2))
    del parts["model.layers.0.mlp.experts.1.up_proj.weight"]
    parts["model.layers.0.mlp.experts.2.down_proj.weight"] = torch.ones(2, 9)
    source = loader(*open_with(tmp_path, parts))
    with pytest.raises(CheckpointError, match=rf"{GATE_UP}'.*found 5 parts"):
        source.get(GATE_UP, 3, 4, 2)
    with pytest.raises(CheckpointError, match=r"experts.2.down_proj.weight'.*found \[2, 9\]"):
        source.get(DOWN, 3, 2, 2)
    with pytest.raises(CheckpointError, match="expected"):
        source.get(DOWN, 4, 2, 2)


def test_verify_lists_everything_at_once(tmp_path):
    parts = split_experts(torch.randn(3, 4, 2), torch.randn(3, 2, 2))
    del parts["model.layers.0.mlp.experts.1.up_proj.weight"]
    parts["model.layers.0.mlp.experts.2.down_proj.weight"] = torch.ones(2, 9)
    plain = {
        "model.norm.weight": torch.ones(5),
        "model.stray.weight": torch.ones(2, 3),
        "model.q.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "model.good.weight": torch.ones(2).double(),
    }
    checkpoint, names = open_with(tmp_path, {**parts, **plain})
    expected = {
        "norm.weight": (4,),
        "lm_head.weight": (8, 4),
        "embed_tokens.weight": (8, 4),
        "q.weight": (4, 4),
        "good.weight": (2,),
        GATE_UP: (4, 4, 2),
        DOWN: (2, 2, 2),
    }
    with pytest.raises(CheckpointError) as caught:
        verify(expected, names, checkpoint)
    lines = str(caught.value).splitlines()
    experts, disk = "layers.0.mlp.experts", "model.layers.0.mlp.experts"
    assert lines == [
        f"{tmp_path}: the checkpoint does not fit its model: "
        "5 missing, 2 unexpected, 1 mis-shaped, 1 packed tensors",
        "missing (5):",
        "  lm_head.weight [8, 4]",
        "  embed_tokens.weight [8, 4]",
        f"  {experts}.1.up_proj.weight [2, 2]",
        f"  {experts}.3.gate_proj.weight [2, 2]",
        f"  {experts}.3.up_proj.weight [2, 2]",
        "unexpected (2):",
        f"  {experts}.2.down_proj.weight (on disk {disk}.2.down_proj.weight) [2, 9]",
        "  stray.weight (on disk model.stray.weight) [2, 3]",
        "mis-shaped (1):",
        "  norm.weight (on disk model.norm.weight): expected [4], found [5]",
        "packed (1):",
        "  q.weight (on disk model.q.weight): packed as F8_E4M3: quantised checkpoints are not supported yet",
    ]


def test_verify_mis_shaped_expert_by_name(tmp_path):
    parts = split_experts(torch.randn(2, 4, 2), torch.randn(2, 2, 2))
    parts["model.layers.0.mlp.experts.1.down_proj.weight"] = torch.ones(2, 9)
    checkpoint, names = open_with(tmp_path, parts)
    with pytest.raises(
        CheckpointError, match=r"experts.1.down_proj.weight.*expected \[2, 2\], found \[2, 9\]"
    ):
        verify({GATE_UP: (2, 4, 2), DOWN: (2, 2, 2)}, names, checkpoint)
    with pytest.raises(CheckpointError, match=r"gate_up_proj: expected \[2, 5, 2\], found \[2, 4, 2\]"):
        verify({GATE_UP: (2, 5, 2)}, names, checkpoint, prefix_filter=lambda name: name == GATE_UP)


def test_verify_target_and_head_apart(tmp_path):
    checkpoint, names = open_with(
        tmp_path, {"model.norm.weight": torch.ones(4), "mtp.fc.weight": torch.ones(4, 7)}
    )
    expected = {"norm.weight": (4,), "mtp.fc.weight": (4, 8), "mtp.norm.weight": (4,)}
    verify(expected, names, checkpoint, prefix_filter=lambda name: not name.startswith("mtp."))
    with pytest.raises(HeadError, match="the MTP head does not fit its model: 1 missing, 1 mis-shaped"):
        verify(
            expected,
            names,
            checkpoint,
            what="MTP head",
            prefix_filter=lambda name: name.startswith("mtp."),
            error=HeadError,
        )


def test_packed_weights_are_refused_as_floats(tmp_path):
    checkpoint, names = open_with(tmp_path, {"model.w": torch.ones(4, dtype=torch.int8)})
    source = loader(checkpoint, names)
    with pytest.raises(CheckpointError, match="packed as I8"):
        source.get("w", 4)
    assert source.get("w", 4, dtype=torch.int8).dtype is torch.int8


def test_the_embedded_model_loads_whole():
    checkpoint = Checkpoint.open(EMBEDDED)
    names = NameMap(checkpoint)
    shapes = {name: checkpoint.tensors[disk[0]].shape for name, disk in names.sources.items()}
    verify(shapes, names, checkpoint)
    source = loader(checkpoint, names, torch.bfloat16)
    total = sum(source.get(name, *shape).nbytes for name, shape in shapes.items())
    assert total == checkpoint.nbytes


MEMORY_PROBE = """
import sys
from pathlib import Path
import torch
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.load import WeightLoader
from headlong.checkpoint.names import NameMap

def peak():
    # Not ru_maxrss: that one survives exec, so a large parent hides whatever its child does.
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

checkpoint = Checkpoint.open(sys.argv[1])
names = NameMap(checkpoint)
loader = WeightLoader(checkpoint, names, getattr(torch, sys.argv[2]), "cpu")
torch.ones(4).bfloat16()
before = peak()
shapes = {n: (names.fused[n].shape if n in names.fused else checkpoint.tensors[d[0]].shape)
          for n, d in names.sources.items()}
weights = {name: loader.get(name, *shape) for name, shape in shapes.items()}
print(peak() - before, sum(w.nbytes for w in weights.values()))
"""


def peak_growth(folder, dtype: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(folder), dtype], capture_output=True, text=True, check=True
    )
    growth, total = done.stdout.split()
    return int(growth), int(total)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_is_the_model_and_one_buffer(tmp_path):
    mb = 2**20
    # A fused tensor of 96 MB in 12 MB parts, and five plain ones of 20 MB.
    tensors = {f"model.w{i}.weight": torch.ones(20, mb // 4) for i in range(5)}
    tensors |= {f"model.l.mlp.experts.{e}.down_proj.weight": torch.ones(12, mb // 4) for e in range(8)}
    open_with(tmp_path, tensors)
    growth, total = peak_growth(tmp_path, "float32")
    assert total == 196 * mb and 0.9 * total < growth <= total + 40 * mb
    growth, total = peak_growth(tmp_path, "bfloat16")
    assert total == 98 * mb and 0.9 * total < growth <= total + 40 * mb
