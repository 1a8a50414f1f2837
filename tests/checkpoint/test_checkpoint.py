"""Opening a folder: configs, index, single file, loose files and sidecars, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.errors import CheckpointError


def make_folder(folder: Path, files: dict[str, dict], index: dict | None = None, config: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def ones(n: int = 1) -> torch.Tensor:
    return torch.ones(n)


def test_single_file_and_configs(tmp_path):
    make_folder(
        tmp_path, {"model.safetensors": {"a": ones(3)}, "extra.safetensors": {"z": ones()}}, config='{"x": 1}'
    )
    checkpoint = Checkpoint.open(str(tmp_path))
    assert checkpoint.config == {"x": 1} and checkpoint.generation_config == {}
    assert list(checkpoint.tensors) == ["a"] and checkpoint.nbytes == 12 and checkpoint.folder == tmp_path
    assert torch.equal(checkpoint.read("a"), ones(3))
    (tmp_path / "generation_config.json").write_text('{"top_k": 4}')
    assert Checkpoint.open(tmp_path).generation_config == {"top_k": 4}
    with pytest.raises(CheckpointError, match="no tensor 'b'"):
        checkpoint.read("b")


def test_loose_files_and_sidecar(tmp_path):
    files = {
        "x.safetensors": {"a": ones()},
        "y.safetensors": {"b": ones()},
        "mtp.safetensors": {"fc": ones()},
    }
    checkpoint = Checkpoint.open(make_folder(tmp_path, files))
    assert set(checkpoint.tensors) == {"a", "b", "fc"}
    assert checkpoint.sidecars == {tmp_path / "mtp.safetensors"}


def test_index_decides(tmp_path):
    files = {
        "s1.safetensors": {"a": ones(1), "b": ones(1)},
        "s2.safetensors": {"b": ones(2)},
        "stray.safetensors": {"c": ones()},
        "mtp-head.safetensors": {"h": ones()},
        "mtp_listed.safetensors": {"mtp.l": ones()},
    }
    index = {"a": "s1.safetensors", "b": "s2.safetensors", "mtp.l": "mtp_listed.safetensors"}
    checkpoint = Checkpoint.open(make_folder(tmp_path, files, index))
    assert set(checkpoint.tensors) == {"a", "b", "h", "mtp.l"}
    assert checkpoint.tensors["b"].shape == (2,)
    assert checkpoint.sidecars == {tmp_path / "mtp-head.safetensors"}


def test_all_missing_shards_in_one_error(tmp_path):
    index = {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s3.safetensors"}
    make_folder(tmp_path, {"s1.safetensors": {"a": ones()}}, index)
    with pytest.raises(CheckpointError, match=r"2 of 3 shards are missing: s2.safetensors, s3.safetensors"):
        Checkpoint.open(tmp_path)


def test_tensor_the_shard_lacks(tmp_path):
    make_folder(tmp_path, {"s.safetensors": {"a": ones()}}, {"a": "s.safetensors", "b": "s.safetensors"})
    with pytest.raises(CheckpointError, match=r"1 tensors their shards lack: 'b' \(s.safetensors\)"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "file", ["../s.safetensors", "d/s.safetensors", "d\\s.safetensors", "s.bin", 3, "", "\0.safetensors"]
)
def test_index_must_not_reach_outside(tmp_path, file):
    make_folder(tmp_path / "m", {"s.safetensors": {"a": ones()}}, {"a": file})
    save_file({"a": ones()}, tmp_path / "s.safetensors")
    with pytest.raises(CheckpointError, match=r"index.json: tensor 'a'"):
        Checkpoint.open(tmp_path / "m")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{"])
def test_damaged_index(tmp_path, content):
    make_folder(tmp_path, {"s.safetensors": {"a": ones()}})
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(tmp_path)


def test_same_name_in_two_files(tmp_path):
    make_folder(tmp_path, {"model.safetensors": {"a": ones()}, "mtp.safetensors": {"a": ones()}})
    with pytest.raises(CheckpointError, match=r"'a' is in both model.safetensors and mtp.safetensors"):
        Checkpoint.open(tmp_path)


def test_folder_without_weights(tmp_path):
    make_folder(tmp_path, {})
    nothing = r"has no \.safetensors and no \.gguf files"
    with pytest.raises(CheckpointError, match=f"{nothing}$"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=rf"{nothing}; model\.pt cannot be read"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=rf"{nothing}; model\.pt and 1 more cannot be read"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("model", ["model.safetensors", "weights.safetensors"])
def test_an_adapter_beside_the_model_is_told(tmp_path, caplog, model):
    make_folder(tmp_path, {model: {"a": ones()}, "adapter_model.safetensors": {"lora": ones()}})
    checkpoint = Checkpoint.open(tmp_path)
    assert list(checkpoint.tensors) == ["a"] and checkpoint.adapter == tmp_path / "adapter_model.safetensors"
    assert "adapter (LoRA) that is not applied" in caplog.text


def test_an_adapter_alone(tmp_path):
    make_folder(tmp_path, {"adapter_model.safetensors": {"lora": ones()}})
    with pytest.raises(CheckpointError, match=r"holds an adapter \(adapter_model.safetensors\) and no model"):
        Checkpoint.open(tmp_path)


def test_no_folder_and_no_config(tmp_path):
    with pytest.raises(CheckpointError, match="not a folder"):
        Checkpoint.open(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_infinities_are_no_json_but_real_configs_have_them(tmp_path, value):
    make_folder(tmp_path, {"model.safetensors": {"a": torch.ones(1)}})
    (tmp_path / "config.json").write_text(f'{{"time_step_limit": [0.0, {value}]}}')
    assert Checkpoint.open(tmp_path).config["time_step_limit"][0] == 0.0
    (tmp_path / "generation_config.json").write_text(f'{{"a": {value}}}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not valid JSON"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"3", b"{", b'{"a": 1e999}',
        b'{"a": "\xff"}', b'{"a": 1, "a": 2}', b'{"a":' + b"[" * 200_000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_damaged_config(tmp_path, file, content):
    make_folder(tmp_path, {"model.safetensors": {"a": ones()}})
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file}: (not valid JSON|expected|JSON nested)"):
        Checkpoint.open(tmp_path)


def test_embedded_model_opens():
    checkpoint = Checkpoint.open(EMBEDDED)
    assert checkpoint.config["model_type"] == "qwen3_5_text"
    assert checkpoint.nbytes == 40_937_664
    embedding = checkpoint.read("model.embed_tokens.weight")
    assert embedding.shape == (8192, 384) and embedding.isfinite().all()
