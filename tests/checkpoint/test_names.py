"""The name tables: every prefix, every skip with its reason, sidecars, and fused experts."""

import pytest
import torch
from safetensors.torch import save_file

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.names import PREFIXES, Fused, NameMap, Skip, canonical
from headlong.checkpoint.source import EMBEDDED
from headlong.errors import CheckpointError


def open_with(folder, tensors: dict, sidecar: dict | None = None) -> Checkpoint:
    (folder / "config.json").write_text("{}")
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, folder / "model.safetensors")
    if sidecar:
        save_file({name: torch.ones(shape) for name, shape in sidecar.items()}, folder / "mtp.safetensors")
    return Checkpoint.open(folder)


def test_prefixes_are_sorted_longest_first():
    lengths = [len(prefix) for prefix, _ in PREFIXES]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("disk", "name"),
    [
        ("model.language_model.mtp.fc.weight", "mtp.fc.weight"),
        ("language_model.model.mtp.fc.weight", "mtp.fc.weight"),
        ("language_model.mtp.fc.weight", "mtp.fc.weight"),
        ("model.mtp.fc.weight", "mtp.fc.weight"),
        ("mtp.layers.0.input_layernorm.weight", "mtp.layers.0.input_layernorm.weight"),
        ("model.language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.language_model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "embed_tokens.weight"),
        ("model.norm.weight", "norm.weight"),
        ("norm.weight", "norm.weight"),
    ],
)
def test_prefix(disk, name):
    assert canonical(disk) == name


def test_every_row_of_the_table_is_used():
    for prefix, replacement in PREFIXES:
        assert canonical(f"{prefix}weight") == f"{replacement}weight"


@pytest.mark.parametrize(
    ("disk", "name"),
    [
        ("fc.weight", "mtp.fc.weight"),
        ("layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("model.mtp.fc.weight", "mtp.fc.weight"),
    ],
)
def test_sidecar(disk, name):
    assert canonical(disk, sidecar=True) == name


@pytest.mark.parametrize(
    "disk",
    ["model.visual.x", "visual.x", "model.vision_tower.x", "vision_tower.x", "multi_modal_projector.x"],
)
def test_vision_is_skipped(disk):
    assert canonical(disk) == Skip("vision tower: Headlong serves text")


def test_rotary_is_skipped():
    skip = canonical("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert isinstance(skip, Skip) and "computed, not stored" in skip.reason
    assert canonical("model.visualiser.weight") == "visualiser.weight"


def test_map_of_a_checkpoint(tmp_path):
    names = NameMap(
        open_with(
            tmp_path,
            {
                "model.norm.weight": (4,),
                "model.visual.a": (1,),
                "model.visual.b": (1,),
                "x.rotary_emb.inv_freq": (1,),
            },
            sidecar={"fc.weight": (4, 8)},
        )
    )
    assert names.sources == {"norm.weight": ("model.norm.weight",), "mtp.fc.weight": ("fc.weight",)}
    assert sorted(names.skipped["vision tower: Headlong serves text"]) == ["model.visual.a", "model.visual.b"]
    assert len(names.skipped) == 2
    assert "norm.weight" in names and "lm_head.weight" not in names


def test_two_disk_names_of_one_tensor(tmp_path):
    checkpoint = open_with(tmp_path, {"model.norm.weight": (4,), "language_model.model.norm.weight": (4,)})
    with pytest.raises(CheckpointError, match=r"both 'norm.weight'"):
        NameMap(checkpoint)


def experts(prefix: str, count: int) -> dict:
    parts = {}
    for e in range(count):
        parts[f"{prefix}.{e}.gate_proj.weight"] = (3, 2)
        parts[f"{prefix}.{e}.up_proj.weight"] = (3, 2)
        parts[f"{prefix}.{e}.down_proj.weight"] = (2, 3)
    return parts


def test_experts_are_fused(tmp_path):
    names = NameMap(open_with(tmp_path, experts("model.layers.0.mlp.experts", 12)))
    assert set(names.sources) == {"layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"}
    gate_up = names.fused["layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (12, 6, 2) and gate_up.missing(12) == []
    assert names.fused["layers.0.mlp.experts.down_proj"].shape == (12, 2, 3)
    disk = names.sources["layers.0.mlp.experts.gate_up_proj"]
    assert disk[:3] == tuple(
        f"model.layers.0.mlp.experts.{part}.weight" for part in ("0.gate_proj", "0.up_proj", "1.gate_proj")
    )
    assert disk[-1] == "model.layers.0.mlp.experts.11.up_proj.weight"  # by number, not by spelling


def test_holes_and_odd_shapes_have_no_fused_shape(tmp_path):
    parts = experts("model.mtp.layers.0.mlp.experts", 3)
    del parts["model.mtp.layers.0.mlp.experts.1.up_proj.weight"]
    parts["model.mtp.layers.0.mlp.experts.2.down_proj.weight"] = (2, 4)
    names = NameMap(open_with(tmp_path, parts))
    gate_up = names.fused["mtp.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.shape is None and gate_up.missing(3) == ["mtp.layers.0.mlp.experts.1.up_proj.weight"]
    assert names.fused["mtp.layers.0.mlp.experts.down_proj"].shape is None


@pytest.mark.parametrize(
    "clash", ["model.layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.0.up_proj.weight"]
)
def test_experts_stored_twice(tmp_path, clash):
    parts = {**experts("model.layers.0.mlp.experts", 2), clash: (2, 6, 2)}
    with pytest.raises(CheckpointError, match="on disk are both"):
        NameMap(open_with(tmp_path, parts))


def test_only_weights_of_experts_are_parts(tmp_path):
    odd = {
        f"model.layers.0.mlp.experts.{tail}": (1,)
        for tail in ("0.gate_proj.weight_scale", "007.up_proj.weight")
    }
    names = NameMap(open_with(tmp_path, odd))
    assert not names.fused and len(names.sources) == 2


def test_part_shape_of_an_uneven_whole():
    fused = Fused("x.mlp.experts.gate_up_proj", ("gate_proj", "up_proj"), {})
    assert fused.part_shape((2, 7, 3)) is None and fused.part_shape((2, 6)) is None
    assert fused.part_shape((2, 6, 3)) == (3, 3)


def test_every_tensor_of_the_embedded_model_maps():
    checkpoint = Checkpoint.open(EMBEDDED)
    names = NameMap(checkpoint)
    assert len(names.sources) == len(checkpoint.tensors) and not names.skipped
    assert {"embed_tokens.weight", "norm.weight", "mtp.fc.weight", "mtp.norm.weight"} <= set(names.sources)
    assert all(name.startswith(("embed_tokens.", "norm.", "layers.", "mtp.")) for name in names.sources)
