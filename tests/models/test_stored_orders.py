"""Orders that a file may store values in and that only its family, its names or its metadata tell: where the shapes of
a model contradict them, it is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.engine.build import survey
from headlong.errors import CheckpointError
from headlong.models import registry
from support import tiny

WEIGHTS = "model.safetensors"


def as_mlx(name: str, weight: Tensor) -> Tensor:
    if name.endswith("conv1d.weight"):
        return weight.transpose(1, 2).contiguous()
    return weight + 1 if "norm" in name and "linear_attn.norm" not in name else weight


def written(folder: Path, made: tiny.Tiny, weights: dict[str, Tensor], by: str | None) -> Path:
    tiny.write(folder, tiny.read_config(made.folder), weights)
    save_file(weights, folder / WEIGHTS, {"format": by} if by else None)
    return folder


def test_norms_around_zero_or_one(tmp_path):
    """MLX adds one to norms and turns convolutions; its metadata says so, and convolutions must agree with it."""
    made = tiny.make(tmp_path / "made", seed=3)
    usual = tiny.tensors(made)
    mlx = {name: as_mlx(name, weight) for name, weight in usual.items()}
    for folder, weights, by in (("usual", usual, "pt"), ("mlx", mlx, "mlx"), ("silent", usual, None)):
        survey(Checkpoint.open(written(tmp_path / folder, made, weights, by)))
    for folder, weights, by in (
        ("no word", mlx, None),
        ("other word", mlx, "pt"),
        ("only word", usual, "mlx"),
    ):
        with pytest.raises(CheckpointError, match=r"mis-shaped: layers\.0\.linear_attn\.conv1d\.weight"):
            survey(Checkpoint.open(written(tmp_path / folder, made, weights, by)))


def test_rotated_inputs_are_refused(tmp_path):
    made = tiny.make(tmp_path / "made", seed=3)
    rotates = {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}
    section = {"quant_method": "compressed-tensors", "transform_config": rotates}
    tiny.write(
        tmp_path / "rotated",
        tiny.read_config(made.folder) | {"quantization_config": section},
        tiny.tensors(made),
    )
    with pytest.raises(
        CheckpointError, match=r"'compressed-tensors'\) says that inputs are rotated .*'input'"
    ):
        survey(Checkpoint.open(tmp_path / "rotated"))


@pytest.mark.parametrize(
    ("family", "sizes", "turned"),
    [
        # Where one of the two is square the other is not, so that both together tell.
        ("moe", {"hidden_size": 48, "moe_intermediate_size": 24}, "down_proj"),
        ("gpt_oss", {"head": False, "hidden_size": 48, "intermediate_size": 48}, "gate_up_proj"),
    ],
)
def test_experts_with_inputs_and_outputs_the_other_way_round(tmp_path, family, sizes, turned):
    made = tiny.make(tmp_path / "made", family, seed=3, **sizes)
    usual = tiny.tensors(made)
    fused = [name for name in usual if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    square = {name.rpartition(".")[2] for name in fused if usual[name].shape[1] == usual[name].shape[2]}
    assert square == {"gate_up_proj", "down_proj"} - {turned}
    other = {name: usual[name].transpose(1, 2).contiguous() for name in fused}
    survey(Checkpoint.open(written(tmp_path / "usual", made, usual, "pt")))
    with pytest.raises(CheckpointError, match=rf"mis-shaped: .*experts\.{turned}"):
        survey(Checkpoint.open(written(tmp_path / "other", made, usual | other, "pt")))


def test_gates_and_ups_of_a_release_that_takes_turns():
    """The same tensor is read by turns in gpt-oss and as two halves in Qwen3.5: the family says."""
    turns = registry.find({"model_type": "gpt_oss"}).naming.stored("layers.0.mlp.experts.gate_up_proj")
    halves = registry.find({"model_type": "qwen3_5_moe_text"}).naming.stored(
        "layers.0.mlp.experts.gate_up_proj"
    )
    stored = torch.arange(12.0).view(1, 2, 6)
    assert turns.to_model(stored)[0, :, 0].tolist() == [0, 2, 4, 1, 3, 5]
    assert halves.to_model(stored).equal(stored)
