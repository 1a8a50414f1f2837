"""`headlong inspect` and `headlong list`: facts from headers, verdicts by exit code."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.cli.modules import ranges
from headlong.convert.to_gguf import to_gguf
from headlong.quant import rtn
from support import tiny
from support.command import Headlong


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(EMBEDDED.glob("*.safetensors")) for k, v in load_file(file).items()}


def write_model(folder: Path, tensors: dict[str, torch.Tensor], **changes: object) -> str:
    config = json.loads((EMBEDDED / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def without_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}


def test_json_of_the_embedded_model(headlong: Headlong, tensors: dict[str, torch.Tensor]) -> None:
    done = headlong("inspect", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert set(found) == {
        *("path", "servable", "reason", "architecture", "bytes", "parameters"),
        *("modules", "skipped", "state", "head", "sampling"),
    }
    assert found["servable"] and found["reason"] is None
    verdict = found["head"].pop("verdict")
    assert found["head"] == {"usable": True, "reason": None}
    assert verdict == "usable head, 4.0 MB (BF16), drafts up to 8 tokens a step"
    assert found["architecture"]["layers"] == {"linear_attention": 6, "full_attention": 2}
    on_disk = {
        part: sum(t.nbytes for name, t in tensors.items() if name.startswith("mtp.") == (part == "head"))
        for part in ("target", "head")
    }
    assert found["bytes"] == on_disk
    for part, nbytes in on_disk.items():
        assert sum(m["bytes"] for m in found["modules"] if m["part"] == part) == nbytes
    assert sum(m["count"] for m in found["modules"]) == len(tensors)
    grouped = next(m for m in found["modules"] if m["name"].endswith("linear_attn.in_proj_qkv.weight"))
    assert grouped["name"].startswith("layers.0-2,4-6.") and grouped["count"] == 6
    assert grouped["shape"] == [1024, 384] and grouped["format"] == "BF16"
    assert found["state"]["kv_bytes_per_token"] > 0
    assert found["state"]["recurrent_bytes_per_sequence"] > 0
    every = json.loads(headlong("inspect", "--json", "--all").out)["modules"]
    assert len(every) == len(tensors) and all(m["count"] == 1 for m in every)


def test_packed_modules_and_reasons(
    headlong: Headlong, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    stored = {}
    for name, weight in tensors.items():
        parts = {"weight": weight}
        if "mlp" in name and name.startswith("model."):
            _, parts = rtn.quantize(weight, "fp8_block")
        stem = name.removesuffix("weight")
        stored |= {stem + part if name.endswith("weight") else name: tensor for part, tensor in parts.items()}
    claims = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    write_model(tmp_path, stored, quantization_config=claims)
    found = json.loads(headlong("inspect", str(tmp_path), "--json", "--context", "100", "--batch", "3").out)
    modules = {module["name"]: module for module in found["modules"]}
    down = modules["layers.0-2,4-6.mlp.down_proj.weight"]
    assert (down["format"], down["kernel"], down["device"]) == ("fp8 128x128", "native", "cpu")
    assert 8 < down["bits"] < 8.01 and "weight F8_E4M3, weight_scale_inv BF16" in down["reason"]
    out = modules["layers.0-2,4-6.linear_attn.out_proj.weight"]
    assert (
        out["format"] == "BF16"
        and "the config says fp8 (quant_method 'fp8'), the tensors are bf16" in out["reason"]
    )
    head = modules["mtp.layers.0.mlp.down_proj.weight"]
    assert head["format"] == "BF16" and "the tensors are bf16" in head["reason"]
    state = found["state"]
    assert state["kv_bytes"] == 300 * state["kv_bytes_per_token"]
    assert state["recurrent_bytes"] == 3 * state["recurrent_bytes_per_sequence"]
    assert headlong("inspect", str(tmp_path), "--batch", "0").code == 2
    shown = headlong("inspect", str(tmp_path), "--draft-quantization", "int4").out
    assert "packed on load as int4" in shown and "for 1 sequence of 4096 tokens on cpu" in shown


def test_state_follows_the_dtype(headlong: Headlong) -> None:
    def kv_bytes(*flags: str) -> int:
        return json.loads(headlong("inspect", "--json", *flags).out)["state"]["kv_bytes_per_token"]

    assert kv_bytes("--dtype", "float32") == 2 * kv_bytes("--dtype", "bfloat16")
    # Two attention layers of the target, one of the head.
    assert 3 * kv_bytes("--dtype", "float32", "--mtp", "off") == 2 * kv_bytes("--dtype", "float32")


def test_table(headlong: Headlong) -> None:
    done = headlong("inspect")
    assert done.code == 0
    assert "\x1b" not in done.out
    for words in ("qwen3_5_text", "layers.3,7.self_attn.q_proj.weight", "usable head", "can be served"):
        assert words in done.out


def test_head_missing(headlong: Headlong, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    vision = {"model.visual.patch.weight": torch.zeros(2, 3)}
    folder = write_model(tmp_path, without_head(tensors) | vision)
    done = headlong("inspect", folder, "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["servable"]
    assert not found["head"]["usable"] and "no MTP head" in found["head"]["reason"]
    assert found["bytes"]["head"] == 0
    assert found["skipped"] == [{"reason": "vision tower: Headlong serves text", "count": 1, "bytes": 24}]
    assert "no drafting: the checkpoint has no MTP head" in headlong("inspect", folder).out
    insisting = headlong("inspect", folder, "--mtp", "on")
    assert insisting.code == 1 and "cannot be served: mtp='on'" in insisting.out
    ran = headlong("run", folder, "--max-tokens", "4", "Hello")
    assert ran.code == 0 and "MTP off: the checkpoint has no MTP head" in ran.err
    refused = headlong("run", folder, "--mtp", "on", "Hello")
    assert refused.code == 2 and refused.err.count("\n") == 1


def test_head_broken(headlong: Headlong, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    broken = {name: tensor for name, tensor in tensors.items() if name != "mtp.fc.weight"}
    folder = write_model(tmp_path, broken)
    done = headlong("inspect", folder, "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["servable"] and not found["head"]["usable"]
    assert (
        found["head"]["verdict"].startswith("no drafting: ") and "mtp.fc.weight" in found["head"]["verdict"]
    )
    assert found["state"] is not None
    insisting = headlong("inspect", folder, "--mtp", "on", "--json")
    found = json.loads(insisting.out)
    assert insisting.code == 1 and not found["servable"]
    assert "mtp.fc.weight" in found["head"]["reason"] and "--mtp off" in found["reason"]
    ran = headlong("run", folder, "--max-tokens", "4", "Hello")
    assert ran.code == 0 and "MTP off" in ran.err and "mtp.fc.weight" in ran.err


def test_target_broken(headlong: Headlong, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    folder = write_model(tmp_path, {k: v for k, v in tensors.items() if k != "model.norm.weight"})
    done = headlong("inspect", folder)
    assert done.code == 1
    assert "cannot be served" in done.out and "norm.weight [384]" in done.out


def test_a_refusal_stays_on_the_screen(
    headlong: Headlong, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    stored = {name.replace("proj.weight", "proj.W_q"): tensor for name, tensor in tensors.items()}
    folder = write_model(tmp_path, stored, quantization_config={"quant_method": "hqq"})
    done = headlong("inspect", folder)
    said = " ".join(done.out.split())  # a terminal may cut lines anywhere
    assert done.code == 1 and len(done.out.splitlines()) <= 24
    assert "quant_method 'hqq', which Headlong does not read" in said
    assert "tensors, which --all lists" in said and said.endswith("more, which --verbose lists")
    assert len(headlong("inspect", folder, "--all").out.splitlines()) > 100


def test_unsupported_architecture(
    headlong: Headlong, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = write_model(tmp_path, tensors, model_type="mystery")
    done = headlong("inspect", folder, "--json")
    found = json.loads(done.out)
    assert done.code == 1
    assert found["architecture"] == {"model_type": "mystery"}
    assert "'mystery' is not supported" in found["reason"]


def test_damaged_file(headlong: Headlong, tmp_path: Path) -> None:
    folder = write_model(tmp_path, {"model.norm.weight": torch.zeros(4)})
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    done = headlong("inspect", folder, "--json")
    assert done.code == 1
    assert "model.safetensors" in json.loads(done.out)["reason"]


def test_list(headlong: Headlong) -> None:
    done = headlong("list")
    assert done.code == 0
    line = next(line for line in done.out.splitlines() if "tale-20m" in line)
    assert "qwen3_5_text" in line and " yes " in line and str(EMBEDDED) in line


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([0, 1, 3, 5, 6], "0-1,3,5-6")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_heads_in_layers(headlong: Headlong, tmp_path: Path, family: str) -> None:
    """With copies that are not loaded, in safetensors and in GGUF."""
    sizes = {"hidden_size": 64, "vocab_size": 64, "num_hidden_layers": 2, "kv_lora_rank": 64}
    made = tiny.make(tmp_path / "made", family, **sizes)
    to_gguf(Checkpoint.open(made.folder), tmp_path / "packed.gguf", type="q8_0")
    for path in (made.folder, tmp_path / "packed.gguf"):
        done = headlong("inspect", str(path))
        assert done.code == 0 and "can be served" in done.out
        assert "MTP:    usable head" in done.out
        told = "skipped: 2 tensors, 32.8 kB (copy of the target's" if path == made.folder else "Q8_0"
        assert told in done.out
