"""`extract` and `strip`: a head out of every kind of artifact, and the model without it; there and back by `graft`."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from safetensors.torch import load_file

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.config import EngineConfig
from headlong.convert.extract import extract
from headlong.convert.graft import graft
from headlong.convert.strip import strip
from headlong.convert.to_gguf import to_gguf
from headlong.engine.build import survey
from headlong.errors import CheckpointError, HeadError
from support import artifacts, tiny
from support.written import assert_interruptible, assert_same, command, tensors

ALIKE = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}


@pytest.fixture(scope="module")
def tale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tale") / "tale.gguf"
    to_gguf(Checkpoint.open(EMBEDDED), path, type="q8_0")
    return path


def there_and_back(model: Path, folder: Path, suffix: str) -> Path:
    """The head out, the model without it, and the two together again."""
    checkpoint = Checkpoint.open(model)
    head = folder / "apart" / f"mtp-head{suffix}"
    head.parent.mkdir()
    bare, whole = folder / f"bare{model.suffix}", folder / f"whole{model.suffix}"
    extract(checkpoint, head)
    strip(checkpoint, bare)
    assert survey(Checkpoint.open(bare)).head_refusal is not None
    assert not any(name.startswith("mtp.") for name in tensors(bare))
    graft(bare, head, whole)
    assert survey(Checkpoint.open(whole), EngineConfig(mtp="on")).head_refusal is None
    return whole


@pytest.mark.parametrize("name", artifacts.RELEASES)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    """Artifacts like published ones: wrapped and flat, fused experts and apart, packed in every way."""
    made = artifacts.make(tmp_path / "made", name)
    whole = there_and_back(made.folder, tmp_path, ".safetensors")
    assert_same(made.folder, whole)


def test_there_and_back_over_shards(tmp_path: Path) -> None:
    whole = there_and_back(EMBEDDED, tmp_path, ".safetensors")
    assert_same(EMBEDDED, whole)
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    assert {file for name, file in index["weight_map"].items() if name.startswith("mtp.")} == {
        "mtp.safetensors"
    }
    assert index["metadata"]["total_size"] == Checkpoint.open(EMBEDDED).nbytes
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (whole / file).read_bytes() == (EMBEDDED / file).read_bytes()
    assert json.loads((whole / "config.json").read_text()) == json.loads(
        (EMBEDDED / "config.json").read_text()
    )


def test_there_and_back_in_gguf(tale: Path, tmp_path: Path) -> None:
    whole = there_and_back(tale, tmp_path, ".gguf")
    before, after = GGUFReader(tale), GGUFReader(whole)
    assert {t.name for t in before.tensors} == {t.name for t in after.tensors}
    stored = {t.name: t for t in after.tensors}
    for tensor in before.tensors:
        other = stored[tensor.name]
        assert (other.tensor_type, other.shape.tolist()) == (tensor.tensor_type, tensor.shape.tolist())
        assert np.array_equal(other.data, tensor.data), tensor.name
    assert {k: f.contents() for k, f in before.fields.items() if not k.startswith("GGUF.")} == {
        k: f.contents() for k, f in after.fields.items() if not k.startswith("GGUF.")
    }


@pytest.mark.parametrize("experts", ["fused", "apart"])
def test_there_and_back_with_experts(tmp_path: Path, experts: str) -> None:
    tiny.make(tmp_path / "made", "moe", experts=experts, **ALIKE)
    assert_same(tmp_path / "made", there_and_back(tmp_path / "made", tmp_path, ".safetensors"))
    to_gguf(Checkpoint.open(tmp_path / "made"), tmp_path / "made.gguf", type="f32")
    (tmp_path / "gguf").mkdir()
    assert_same(tmp_path / "made.gguf", there_and_back(tmp_path / "made.gguf", tmp_path / "gguf", ".gguf"))


def test_extracted_file(tmp_path: Path) -> None:
    """All parts of a packed head, as they lie on disk, and what it is the head of."""
    made = artifacts.make(tmp_path / "made", "Qwen--Qwen3.6-27B-FP8")
    done = extract(Checkpoint.open(made.folder), tmp_path / "mtp.safetensors")
    found = load_file(tmp_path / "mtp.safetensors")
    stored = load_file(made.folder / "mtp.safetensors")
    assert found.keys() == stored.keys() and any(name.endswith("weight_scale_inv") for name in found)
    assert done.num_tensors == len(stored)
    for name, tensor in stored.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    with safe_open(tmp_path / "mtp.safetensors", "pt") as file:
        told = file.metadata()
    text = json.loads((made.folder / "config.json").read_text())["text_config"]
    for field in ("hidden_size", "vocab_size", "num_attention_heads", "head_dim", "intermediate_size"):
        assert told[field] == str(text[field])
    assert told["model_type"] == "qwen3_5" and told["format"] == "pt"


def test_extracted_from_gguf(tale: Path, tmp_path: Path) -> None:
    """Unpacked as the gguf package does, norms without the 1 that GGUF adds."""
    extract(Checkpoint.open(tale), tmp_path / "mtp.safetensors")
    found = load_file(tmp_path / "mtp.safetensors")
    stored = {t.name: t for t in GGUFReader(tale).tensors if t.name.startswith("blk.8.")}
    assert len(found) == len(stored)
    names = {"mtp.fc.weight": "nextn.eh_proj", "mtp.layers.0.mlp.down_proj.weight": "ffn_down"}
    norms = {
        "mtp.norm.weight": "nextn.shared_head_norm",
        "mtp.layers.0.self_attn.q_norm.weight": "attn_q_norm",
    }
    for name, disk in (names | norms).items():
        tensor = stored[f"blk.8.{disk}.weight"]
        value = torch.from_numpy(dequantize(np.array(tensor.data), tensor.tensor_type).copy())
        value = value.view(found[name].shape) - float(name in norms)
        assert torch.equal(found[name], value.bfloat16()), name
    original = tensors(EMBEDDED)
    assert torch.equal(found["mtp.norm.weight"].view(torch.uint8), original["mtp.norm.weight"][1].view(-1))


def test_extracted_gguf(tale: Path, tmp_path: Path) -> None:
    """Verbatim, without the tokenizer, and found again beside the model."""
    bare, head = tmp_path / "bare.gguf", tmp_path / "mtp-bare.gguf"
    strip(Checkpoint.open(tale), bare)
    extract(Checkpoint.open(tale), head)
    reader = GGUFReader(head)
    assert all(tensor.name.startswith("blk.8.") for tensor in reader.tensors)
    assert not any(key.startswith("tokenizer.") for key in reader.fields)
    beside = Checkpoint.open(bare)
    assert beside.sidecars == {head}
    assert_same(bare, tale)


def test_head_from_safetensors_to_gguf(tale: Path, tmp_path: Path) -> None:
    """Converted as the whole model is."""
    head = tmp_path / "mtp-x.gguf"
    extract(Checkpoint.open(EMBEDDED), head, head_type="q8_0")
    stored = {t.name: t for t in GGUFReader(tale).tensors if t.name.startswith("blk.8.")}
    found = {t.name: t for t in GGUFReader(head).tensors}
    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        assert tensor.tensor_type == stored[name].tensor_type
        assert np.array_equal(tensor.data, stored[name].data)


def test_stripped_folder(tmp_path: Path) -> None:
    """Other engines see a model that never had a head."""
    made = tiny.make(tmp_path / "made", wrapped=True)
    (made.folder / "LICENSE").write_text("free")
    strip(Checkpoint.open(made.folder), tmp_path / "bare")
    assert (tmp_path / "bare" / "LICENSE").read_text() == "free"
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 0
    before, after = (
        load_file(made.folder / "model.safetensors"),
        load_file(tmp_path / "bare" / "model.safetensors"),
    )
    assert after.keys() == {name for name in before if not name.startswith("mtp.")}
    assert all(torch.equal(before[name], after[name]) for name in after)
    _, report = type(made.model).from_pretrained(tmp_path / "bare", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_stripped_gguf(tale: Path, tmp_path: Path) -> None:
    strip(Checkpoint.open(tale), tmp_path / "bare.gguf")
    fields = GGUFReader(tmp_path / "bare.gguf").fields
    assert fields["qwen35.block_count"].contents() == 8
    assert fields["qwen35.nextn_predict_layers"].contents() == 0


def test_values_per_block_lose_the_heads(tmp_path: Path) -> None:
    """Layers that follow no interval are listed one by one, and the head's with them."""
    kinds = [tiny.FULL, tiny.LINEAR, tiny.LINEAR]
    tiny.make(tmp_path / "made", layer_types=kinds, **ALIKE)
    to_gguf(Checkpoint.open(tmp_path / "made"), tmp_path / "made.gguf", type="f32")
    whole = there_and_back(tmp_path / "made.gguf", tmp_path, ".safetensors")
    key = "qwen35.attention.recurrent_layers"
    assert GGUFReader(tmp_path / "bare.gguf").fields[key].contents() == [False, True, True]
    assert GGUFReader(whole).fields[key].contents() == [False, True, True, False]


def test_no_head_to_take(tmp_path: Path) -> None:
    tiny.make(tmp_path / "made", head=False)
    checkpoint = Checkpoint.open(tmp_path / "made")
    for work, out in ((extract, "mtp.safetensors"), (strip, "bare")):
        with pytest.raises(HeadError, match="has no MTP head"):
            work(checkpoint, tmp_path / out)
        assert not (tmp_path / out).exists()


def test_wrong_names(tale: Path, tmp_path: Path) -> None:
    gguf, folder = Checkpoint.open(tale), Checkpoint.open(EMBEDDED)
    with pytest.raises(CheckpointError, match=r"must end in \.safetensors or \.gguf"):
        extract(folder, tmp_path / "mtp.bin")
    with pytest.raises(CheckpointError, match="is a folder, and so must be"):
        strip(folder, tmp_path / "bare.gguf")
    with pytest.raises(CheckpointError, match=r"must end in \.gguf"):
        strip(gguf, tmp_path / "bare")
    assert extract(folder, tmp_path / "head.safetensors").notes
    assert not extract(folder, tmp_path / "mtp.safetensors").notes


def test_outputs_that_would_harm(tmp_path: Path) -> None:
    tiny.make(tmp_path / "made")
    checkpoint = Checkpoint.open(tmp_path / "made")
    before = sorted(tmp_path.rglob("*"))
    for out in (tmp_path / "made" / "mtp.safetensors", tmp_path / "made" / ".." / "made" / "mtp.safetensors"):
        with pytest.raises(CheckpointError, match="is, holds or lies in the input"):
            extract(checkpoint, out, force=True)
    for out in (tmp_path / "made", tmp_path, tmp_path / "made" / "bare"):
        with pytest.raises(CheckpointError, match="is, holds or lies in the input"):
            strip(checkpoint, out, force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_existing_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.make(tmp_path / "made")
    for words in (("extract", "mtp.safetensors"), ("strip", "bare")):
        words = (words[0], str(tmp_path / "made"), "-o", str(tmp_path / words[1]))
        assert command(*words) == 0
        assert words[3] in capsys.readouterr().out
        with pytest.raises(CheckpointError, match="exists already"):
            command(*words)
        assert command(*words, "--force") == 0


def test_interrupted(tale: Path, tmp_path: Path) -> None:
    for checkpoint, head, bare in (
        (Checkpoint.open(EMBEDDED), "mtp.safetensors", "bare"),
        (Checkpoint.open(tale), "mtp-x.gguf", "bare.gguf"),
    ):
        assert_interruptible(partial(extract, checkpoint), tmp_path / head)
        assert_interruptible(partial(strip, checkpoint), tmp_path / bare)
