"""What model code sees: dry run, verification that lists everything, loading, and its memory."""

import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.detect import Detector
from headlong.checkpoint.load import Expectations, Need, WeightLoader
from headlong.checkpoint.names import NameMap
from headlong.checkpoint.source import EMBEDDED
from headlong.checkpoint.tensor_info import map_tensor
from headlong.checkpoint.verify import Verifier
from headlong.convert.to_gguf import to_gguf
from headlong.errors import CheckpointError, HeadError
from headlong.models import registry
from headlong.quant.format import PackedWeight

GATE_UP = "layers.0.mlp.experts.gate_up_proj"
DOWN = "layers.0.mlp.experts.down_proj"


def open_with(folder, tensors: dict) -> tuple[Checkpoint, NameMap]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    return checkpoint, NameMap(checkpoint)


def loader(checkpoint, names, dtype=torch.float32, **kwargs) -> WeightLoader:
    return WeightLoader(names, Detector(checkpoint, names), dtype, "cpu", **kwargs)


def need(*shape: int) -> Need:
    """A matrix, several in one tensor, or a vector, by the number of dimensions."""
    return Need({2: "matrix", 3: "experts"}.get(len(shape), "vector"), shape)


def verify(expected: dict, names, checkpoint, what="checkpoint", **kwargs) -> None:
    Verifier(names, Detector(checkpoint, names)).verify(
        {name: need(*shape) for name, shape in expected.items()}, what=what, where=checkpoint.folder, **kwargs
    )


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
    tensor = source.matrix("a", 10**6, 10**6)
    assert tensor.is_meta and tensor.dtype is torch.bfloat16
    assert source.vector("s", dtype=torch.float32).dtype is torch.float32
    assert len(source.experts("e", 3, 4, 5)) == 3
    assert source.expected == {"a": need(10**6, 10**6), "s": need(), "e": need(3, 4, 5)}
    assert source.has("b") and not source.has("c") and not source.is_packed("a")
    source.matrix("a", 10**6, 10**6)
    with pytest.raises(AssertionError, match="a is asked for"):
        source.vector("a", 3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_whole_numbers(tmp_path, dtype):
    table = torch.tensor([[3, 0], [1, 7]], dtype=dtype)
    checkpoint, names = open_with(tmp_path, {"model.table": table, "model.floats": torch.ones(2, 2)})
    source = loader(checkpoint, names)
    found = source.indices("table", 2, 2, below=8)
    assert found.dtype is torch.int64 and found.tolist() == table.tolist()
    for name, shape, below, words in (
        ("table", (2, 2), 7, r"holds numbers that are not from 0 to 6"),
        ("table", (4,), 8, r"expected whole numbers \[4\]"),
        ("floats", (2, 2), 8, "found F32"),
        ("other", (2, 2), 8, "is missing"),
    ):
        with pytest.raises(CheckpointError, match=words):
            source.indices(name, *shape, below=below)
    dry = Expectations(names)
    assert dry.indices("table", 2, 2, below=8).tolist() == [[0, 0], [0, 0]]
    assert dry.expected == {"table": Need("indices", (2, 2))}
    verifier = Verifier(names, Detector(checkpoint, names))
    verifier.verify(dry.expected, what="model", where=tmp_path, prefix_filter=lambda name: name == "table")
    with pytest.raises(CheckpointError, match="must be whole numbers, found F32"):
        verifier.verify({"floats": Need("indices", (2, 2))}, what="model", where=tmp_path)


def test_loader_converts_checks_and_reports(tmp_path):
    weight = torch.randn(4, 8)
    checkpoint, names = open_with(tmp_path, {"model.a.weight": weight, "model.s": torch.tensor(2.0)})
    seen = []
    source = loader(checkpoint, names, torch.bfloat16)
    source.report = seen.append
    got = source.matrix("a.weight", 4, 8)
    assert got.dtype is torch.bfloat16 and torch.equal(got, weight.bfloat16())
    assert torch.equal(source.vector("a.weight", 4, 8, dtype=torch.float32), weight)
    assert source.vector("s").shape == ()
    assert source.nbytes == 132 and seen == [128, 132, 132]
    assert source.has("a.weight") and not source.has("model.a.weight")
    for ask in (source.matrix, source.vector):
        with pytest.raises(
            CheckpointError, match=r"'a.weight' \(on disk model.a.weight\): expected .*\[8, 4\]"
        ):
            ask("a.weight", 8, 4)
        with pytest.raises(CheckpointError, match=r"'b.weight' is missing"):
            ask("b.weight", 1, 1)


def test_only_what_is_wanted_is_counted(tmp_path):
    checkpoint, names = open_with(tmp_path, {"model.a.weight": torch.ones(4), "mtp.b.weight": torch.ones(4)})
    seen = []
    source = loader(checkpoint, names, wanted=["a.weight"])
    source.report = seen.append
    source.vector("a.weight", 4)
    assert seen == [16] == [source.nbytes]


def test_narrow_floats_stay_where_they_are_to_stay(tmp_path):
    weight = torch.randn(4, 8).bfloat16()
    opened = open_with(tmp_path, {"model.a.weight": weight, "model.b.weight": weight.float()})
    source = loader(*opened, keep_stored=True)
    assert source.is_packed("a.weight") and not source.is_packed("b.weight")
    kept = source.matrix("a.weight", 4, 8)
    assert isinstance(kept, PackedWeight) and kept.nbytes == weight.nbytes
    assert torch.equal(kept.dequantize(1, 3), weight[1:3].float())
    assert torch.equal(source.matrix("b.weight", 4, 8), weight.float())
    plain = loader(*opened).matrix("a.weight", 4, 8)
    assert isinstance(plain, torch.Tensor) and plain.dtype is torch.float32


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_repacking(tmp_path, kind):
    weight = torch.randn(32, 128)
    opened = open_with(tmp_path, {"model.a.weight": weight})
    source = loader(*opened, repack=kind)
    packed = source.matrix("a.weight", 32, 128)
    assert source.is_packed("a.weight") and isinstance(packed, PackedWeight)
    assert packed.nbytes < weight.nbytes / 3
    step = weight.abs().amax() / {"fp8": 16, "int8": 120, "int4": 6}[kind]
    assert (packed.dequantize(0, 32) - weight).abs().max() < step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_one_tensor(tmp_path, dtype):
    gate_up = torch.randn(5, 6, 4)
    checkpoint, names = open_with(tmp_path, {f"model.{GATE_UP}": gate_up})
    found = loader(checkpoint, names, dtype).experts(GATE_UP, 5, 6, 4)
    assert len(found) == 5
    assert all(torch.equal(one, wanted.to(dtype)) for one, wanted in zip(found, gate_up, strict=True))
    with pytest.raises(CheckpointError, match="expected"):
        loader(checkpoint, names).experts(GATE_UP, 4, 6, 4)


def test_packed_experts_in_one_tensor(tmp_path):
    weight, scale = torch.randn(3, 6, 4).to(torch.float8_e4m3fn), torch.rand(3, 6, 1) + 0.5
    tensors = {f"model.{DOWN}": weight, f"model.{DOWN}_scale": scale}
    checkpoint, names = open_with(tmp_path, tensors)
    verify({DOWN: (3, 6, 4)}, names, checkpoint)
    found = loader(checkpoint, names).experts(DOWN, 3, 6, 4)
    for i, one in enumerate(found):
        assert torch.equal(one.dequantize(0, 6), weight[i].float() * scale[i])
    with pytest.raises(CheckpointError, match=r"expected 4 experts, found \[3, 6, 4\]"):
        verify({DOWN: (4, 6, 4)}, names, checkpoint)


def test_mapped_blocks_are_the_ones_that_are_read(tmp_path):
    path = tmp_path / "tale.gguf"
    to_gguf(Checkpoint.open(EMBEDDED), path, type="q8_0")
    checkpoint = Checkpoint.open(path)
    names = registry.names_of(checkpoint)
    name = "layers.0.mlp.down_proj.weight"
    shape = names.sources[name].shape
    read = loader(checkpoint, names).matrix(name, *shape)
    mapped = loader(checkpoint, names, mapped=True).matrix(name, *shape)
    assert isinstance(read, PackedWeight) and isinstance(mapped, PackedWeight)
    assert torch.equal(mapped.tensors[0], read.tensors[0])
    last = max(names.sources.values(), key=lambda info: info.start)
    os.truncate(path, last.start)
    with pytest.raises(CheckpointError, match="the file ends inside it"):
        map_tensor(last)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        map_tensor(last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mapped_floats_are_the_ones_that_are_read(tmp_path, dtype):
    """Where they need no conversion and are not of an odd number of columns; others are read."""
    tensors = {"model.even.weight": torch.randn(6, 4), "model.odd.weight": torch.randn(4, 3)}
    checkpoint, names = open_with(
        tmp_path, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    )
    file = names.sources["even.weight"].file
    mapping = loader(checkpoint, names, dtype, mapped=True)
    found = {name: mapping.matrix(name, *names.sources[name].shape) for name in ("even.weight", "odd.weight")}
    for name, tensor in found.items():
        assert torch.equal(tensor, loader(checkpoint, names, dtype).matrix(name, *tensor.shape))
    before = {name: tensor.clone() for name, tensor in found.items()}
    with file.open("r+b") as written:
        written.seek(min(info.start for info in names.sources.values()))
        written.write(bytes(sum(info.nbytes for info in names.sources.values())))
    assert torch.equal(found["odd.weight"], before["odd.weight"])
    assert torch.equal(found["even.weight"], before["even.weight"]) == (dtype is torch.float32)


def test_verify_lists_everything_at_once(tmp_path):
    parts = split_experts(torch.randn(3, 4, 2), torch.randn(3, 2, 2))
    del parts["model.layers.0.mlp.experts.1.up_proj.weight"]
    plain = {
        "model.norm.weight": torch.ones(5),
        "model.stray.weight": torch.ones(2, 3),
        "model.q.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "model.good.weight": torch.ones(2).double(),
        "model.int.weight": torch.ones(2, dtype=torch.int8),
    }
    checkpoint, names = open_with(tmp_path, {**parts, **plain})
    experts, disk = "layers.0.mlp.experts", "model.layers.0.mlp.experts"
    expected = {
        "norm.weight": (4,),
        "lm_head.weight": (8, 4),
        "embed_tokens.weight": (8, 4),
        "q.weight": (4, 4),
        "good.weight": (2,),
        "int.weight": (2,),
        **{
            f"{experts}.{e}.{kind}.weight": (2, 2)
            for e in range(2)
            for kind in ("gate_proj", "up_proj", "down_proj")
        },
        f"{experts}.2.gate_proj.weight": (2, 9),
    }
    with pytest.raises(CheckpointError) as caught:
        verify(expected, names, checkpoint)
    lines = str(caught.value).splitlines()
    assert lines[:-1] == [
        f"{tmp_path}: the checkpoint does not fit its model: "
        "3 missing, 3 unexpected, 2 mis-shaped, 2 not readable as packed tensors",
        "  missing: lm_head.weight [8, 4]",
        "  missing: embed_tokens.weight [8, 4]",
        f"  missing: {experts}.1.up_proj.weight [2, 2]",
        f"  unexpected: {experts}.2.down_proj.weight (on disk {disk}.2.down_proj.weight) [2, 2]",
        f"  unexpected: {experts}.2.up_proj.weight (on disk {disk}.2.up_proj.weight) [2, 2]",
        "  unexpected: stray.weight (on disk model.stray.weight) [2, 3]",
        "  mis-shaped: norm.weight (on disk model.norm.weight): expected [4], found [5]",
        f"  mis-shaped: {experts}.2.gate_proj.weight (on disk {disk}.2.gate_proj.weight): "
        "expected [2, 9], found [2, 2]",
        lines[-2],
    ]
    assert "q in model.safetensors: an FP8 weight needs weight_scale" in lines[-2]
    assert lines[-1] == (
        "  not readable as packed: int.weight (on disk model.int.weight): must be floats, found I8"
    )


def test_a_refusal_fits_on_a_screen_and_names_the_method(tmp_path, caplog):
    """Hundreds of faults: some of each kind, the rest counted; the log has them all."""
    parts = {f"model.q{i}.weight_qdata": torch.ones(2, 2, dtype=torch.int8) for i in range(100)}
    checkpoint, names = open_with(tmp_path, {**parts, "model.norm.weight": torch.ones(5)})
    checkpoint = replace(checkpoint, config={"quantization_config": {"quant_method": "unheard-of"}})
    expected = {"norm.weight": (4,), **{f"q{i}.weight": (2, 2) for i in range(100)}}
    with caplog.at_level(logging.INFO), pytest.raises(CheckpointError) as caught:
        verify(expected, names, checkpoint)
    lines = str(caught.value).splitlines()
    assert len(lines) == 12 and lines[-1] == "  and 191 more, which --verbose lists"
    assert lines[0].endswith("tensors (quant_method 'unheard-of', which Headlong does not read)")
    for kind in ("missing", "unexpected", "mis-shaped"):
        assert any(line.startswith(f"  {kind}: ") for line in lines)
    for i in range(100):
        assert f"missing: q{i}.weight [2, 2]" in caplog.text


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


def test_the_embedded_model_loads_whole():
    checkpoint = Checkpoint.open(EMBEDDED)
    names = NameMap(checkpoint)
    shapes = {name: info.shape for name, info in names.sources.items() if len(info.shape) != 3}
    convolutions = [name for name, info in names.sources.items() if len(info.shape) == 3]
    verify(shapes, names, checkpoint, prefix_filter=lambda name: name not in convolutions)
    source = loader(checkpoint, names, torch.bfloat16)
    total = sum(source.vector(name, *info.shape).nbytes for name, info in names.sources.items())
    assert total == checkpoint.nbytes


MEMORY_PROBE = """
import sys
from pathlib import Path
import torch
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.detect import Detector
from headlong.checkpoint.load import WeightLoader
from headlong.checkpoint.names import NameMap

def peak():
    # Not ru_maxrss: that one survives exec, so a large parent hides whatever its child does.
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

checkpoint = Checkpoint.open(sys.argv[1])
names = NameMap(checkpoint)
loader = WeightLoader(names, Detector(checkpoint, names), getattr(torch, sys.argv[2]), "cpu")
torch.ones(4).bfloat16()
before = peak()
weights = {name: loader.matrix(name, *info.shape) for name, info in names.sources.items()}
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
    tensors = {f"model.w{i}.weight": torch.ones(20, mb // 4) for i in range(5)}
    tensors |= {f"model.l.mlp.experts.{e}.down_proj.weight": torch.ones(12, mb // 4) for e in range(8)}
    open_with(tmp_path, tensors)
    growth, total = peak_growth(tmp_path, "float32")
    assert total == 196 * mb and 0.9 * total < growth <= total + 40 * mb
    growth, total = peak_growth(tmp_path, "bfloat16")
    assert total == 98 * mb and 0.9 * total < growth <= total + 40 * mb
