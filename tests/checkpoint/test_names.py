"""The name tables: every prefix, every skip with its reason, sidecars, and the parts of packed matrices."""

import pytest
import torch
from safetensors.torch import save_file

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.names import WRAPPERS, NameMap, Skip, canonical
from headlong.checkpoint.source import EMBEDDED
from headlong.checkpoint.transforms import MLX_CONV, NORM
from headlong.errors import CheckpointError
from headlong.models import qwen3_5


def open_with(folder, tensors: dict, sidecar: dict | None = None) -> Checkpoint:
    (folder / "config.json").write_text("{}")
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, folder / "model.safetensors")
    if sidecar:
        save_file({name: torch.ones(shape) for name, shape in sidecar.items()}, folder / "mtp.safetensors")
    return Checkpoint.open(folder)


def test_prefixes_are_sorted_longest_first():
    lengths = [len(prefix) for prefix in WRAPPERS]
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
    for prefix in WRAPPERS:
        assert canonical(f"{prefix}weight") == "weight"


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
    disk = {name: info.name for name, info in names.sources.items()}
    assert disk == {"norm.weight": "model.norm.weight", "mtp.fc.weight": "fc.weight"}
    assert sorted(names.skipped["vision tower: Headlong serves text"]) == ["model.visual.a", "model.visual.b"]
    assert len(names.skipped) == 2
    assert "norm.weight" in names and "lm_head.weight" not in names


def test_two_disk_names_of_one_tensor(tmp_path):
    checkpoint = open_with(tmp_path, {"model.norm.weight": (4,), "language_model.model.norm.weight": (4,)})
    with pytest.raises(CheckpointError, match=r"both 'norm.weight'"):
        NameMap(checkpoint)


@pytest.mark.parametrize(
    ("disk", "name", "parts"),
    [
        (
            ["l.q_proj.qweight", "l.q_proj.scales", "l.q_proj.g_idx"],
            "l.q_proj.weight",
            {"qweight", "scales", "g_idx"},
        ),
        (["l.q_proj.weight", "l.q_proj.bias"], "l.q_proj.weight", {"weight"}),
        (
            ["l.e.gate_up_proj", "l.e.gate_up_proj_scale_inv"],
            "l.e.gate_up_proj",
            {"weight", "weight_scale_inv"},
        ),
        (["l.e.down_proj", "l.e.down_proj_weight_scale"], "l.e.down_proj", {"weight", "weight_scale"}),
        (["l.e.down_proj_packed", "l.e.down_proj_scale"], "l.e.down_proj", {"weight_packed", "weight_scale"}),
    ],
)
def test_parts_of_a_matrix(tmp_path, disk, name, parts):
    names = NameMap(open_with(tmp_path, {f"model.{d}": (2, 2) for d in disk}))
    assert set(names.parts(name)) == parts
    assert name in names and "l.other.weight" not in names


@pytest.mark.parametrize(
    "name", ["k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale"]
)
def test_scales_of_a_cache_are_skipped(name):
    skip = canonical(f"model.layers.0.self_attn.{name}")
    assert isinstance(skip, Skip) and "KV cache" in skip.reason


def test_what_mlx_stores_in_its_own_way(tmp_path):
    tensors = {
        "language_model.model.layers.0.linear_attn.conv1d.weight": torch.ones(6, 4, 1),
        "language_model.model.layers.0.linear_attn.norm.weight": torch.ones(4),
        "language_model.model.layers.0.input_layernorm.weight": torch.ones(4),
        "language_model.model.layers.0.mlp.switch_mlp.gate_proj.weight": torch.ones(2, 3, 4),
    }
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    names = NameMap(Checkpoint.open(tmp_path), qwen3_5.DENSE.naming)
    assert names.transforms == {
        "layers.0.linear_attn.conv1d.weight": MLX_CONV,
        "layers.0.input_layernorm.weight": NORM,
    }
    assert "layers.0.mlp.experts.gate_proj.weight" in names.sources
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert not NameMap(Checkpoint.open(tmp_path), qwen3_5.DENSE.naming).transforms


def test_every_tensor_of_the_embedded_model_maps():
    checkpoint = Checkpoint.open(EMBEDDED)
    names = NameMap(checkpoint)
    assert len(names.sources) == len(checkpoint.tensors) and not names.skipped
    assert {"embed_tokens.weight", "norm.weight", "mtp.fc.weight", "mtp.norm.weight"} <= set(names.sources)
    assert all(name.startswith(("embed_tokens.", "norm.", "layers.", "mtp.")) for name in names.sources)
