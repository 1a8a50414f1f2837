"""`quantize`: transformers with compressed-tensors computes from the files what Headlong does; sizes, refusals."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.config import EngineConfig
from headlong.convert.quantize import FORMATS, quantize
from headlong.convert.to_gguf import to_gguf
from headlong.engine.build import survey
from headlong.errors import CheckpointError, ConfigError
from support import artifacts, tiny, tiny_llama
from support.steps import Driver, load
from support.written import assert_interruptible, command, greedy, tensors

COMPRESSED = ("fp8", "int8", "int4")
STAYS = re.compile(
    r"embed_tokens|lm_head|norm|conv1d|in_proj_[ab]\.|A_log|dt_bias|mlp\.gate\.|shared_expert_gate|visual"
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in every format of a folder."""
    folder = tmp_path_factory.mktemp("packed")
    for format in (*COMPRESSED, "fp8_block"):
        quantize(Checkpoint.open(EMBEDDED), folder / format, format=format)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def quantization(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    driver = Driver(load(folder))
    driver.open("row", [*tokens, 0])
    return driver.feed("row", [len(tokens)]).logits


@torch.no_grad()
def theirs(folder: Path, tokens: list[int]) -> torch.Tensor:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert all(key.startswith("mtp.") for key in report["unexpected_keys"])
    return model.eval()(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("format", COMPRESSED)
def test_embedded_model_in_transformers(packed: Path, format: str) -> None:
    tokens = tiny.random_tokens(8192, 24, seed=1)
    ours = logits(packed / format, tokens)
    assert torch.allclose(ours, theirs(packed / format, tokens), atol=1e-3, rtol=1e-4)
    # And it is a rounded model, not the original: nearer with more bits.
    error = (ours - logits(EMBEDDED, tokens)).abs().mean()
    assert 1e-3 < error < {"fp8": 0.5, "int8": 0.2, "int4": 2.0}[format]


@pytest.mark.parametrize("head", ["keep", "int8"])
@pytest.mark.parametrize("format", COMPRESSED)
@pytest.mark.parametrize("family", ["dense", "llama", "moe"])
def test_tiny_models_in_transformers(tmp_path: Path, family: str, format: str, head: str) -> None:
    """Sizes that groups of 128 do not divide, and experts, which are written one by one."""
    made = tiny_llama.make(tmp_path / "made") if family == "llama" else tiny.make(tmp_path / "made", family)
    quantize(Checkpoint.open(made.folder), tmp_path / "out", format=format, head=head)
    tokens = tiny.random_tokens(made.vocab_size, 16, seed=3)
    ours = logits(tmp_path / "out", tokens)
    assert torch.allclose(ours, theirs(tmp_path / "out", tokens), atol=1e-3, rtol=1e-3)
    found = survey(Checkpoint.open(tmp_path / "out"), EngineConfig(mtp="on"))
    assert found.detector.disagreements == {}
    bits = {name: format.bits for name, format in found.formats.items()}
    assert bits["mtp.fc.weight"] == 32 and (bits["mtp.layers.0.self_attn.q_proj.weight"] < 9) == (
        head == "int8"
    )


@pytest.mark.parametrize("format", [*COMPRESSED, "fp8_block"])
def test_bytes_and_names(packed: Path, format: str) -> None:
    """Packed are the layers' matrices and nothing else, at the format's bits; all else is bit for bit the same."""
    before, after = weights(EMBEDDED), weights(packed / format)
    expected = 0
    for name, weight in before.items():
        if STAYS.search(name) or name.startswith("mtp."):
            assert torch.equal(after.pop(name), weight), name
            continue
        module = name.removesuffix(".weight")
        parts = [key for key in after if key.startswith(f"{module}.")]
        size = sum(after.pop(part).nbytes for part in parts)
        rows, columns = weight.shape
        scales = {
            "int4": rows * columns // 128,
            "fp8_block": -(-rows // 128) * -(-columns // 128),
        }.get(format, rows)
        codes = weight.numel() // 2 if format == "int4" else weight.numel()
        shape = 16 if format.startswith("int") else 0
        assert size == codes + 2 * scales + shape, name
        expected += size
    assert after == {} and expected > 0
    assert survey(Checkpoint.open(packed / format)).detector.disagreements == {}


def test_sizes(packed: Path) -> None:
    """A table of all: eight bits halve the layers, four bits quarter them; embedding and head stay."""
    original = Checkpoint.open(EMBEDDED)
    stays = sum(
        info.nbytes for name, info in original.tensors.items() if STAYS.search(name) or "mtp." in name
    )
    layers = original.nbytes - stays
    for format, share in {"fp8": 0.5, "int8": 0.5, "fp8_block": 0.5, "int4": 0.2578}.items():
        found = Checkpoint.open(packed / format).nbytes
        assert found == pytest.approx(stays + share * layers, rel=0.005), format


def test_blocks_of_fp8(packed: Path) -> None:
    """What the config promises: code times the scale of its block of 128 by 128, at most half a step away."""
    config = quantization(packed / "fp8_block")
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    assert {"lm_head", "mtp.fc", "model.layers.0.linear_attn.in_proj_a"} <= set(
        config["modules_to_not_convert"]
    )
    before, after = weights(EMBEDDED), weights(packed / "fp8_block")
    name = "model.layers.0.mlp.down_proj.weight"
    scale = after[f"{name}_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    value = after[name].float() * scale[: before[name].shape[0], : before[name].shape[1]]
    error, weight = (value - before[name].float()).abs(), before[name].float().abs()
    # Three bits behind the leading one, and in the lowest binade steps of 2**-9.
    assert (
        error <= torch.maximum(weight * 2**-4, scale[: error.shape[0], : error.shape[1]] * 2**-10) * 1.01
    ).all()


@pytest.mark.parametrize("format", COMPRESSED)
def test_drafting_changes_no_token(packed: Path, format: str) -> None:
    drafted, share = greedy(packed / format, "on")
    assert drafted == greedy(packed / format, "off")[0]
    assert share > 0.4


def test_head_in_a_group_of_its_own(tmp_path: Path) -> None:
    words = ("quantize", str(EMBEDDED), "-o", str(tmp_path / "out"), "--format", "int4", "--group-size", "64")
    assert command(*words, "--head", "fp8") == 0
    config = quantization(tmp_path / "out")
    layers, head = config["config_groups"].values()
    assert config["format"] == "mixed-precision"
    assert (layers["format"], layers["weights"]["group_size"]) == ("pack-quantized", 64)
    assert head["format"] == "float-quantized"
    assert set(head["targets"]) == {
        f"mtp.layers.0.{module}"
        for module in (
            *(f"self_attn.{x}_proj" for x in "qkvo"),
            *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        )
    }
    assert "mtp.fc" in config["ignore"]
    tokens = tiny.random_tokens(8192, 12, seed=1)
    assert torch.allclose(
        logits(tmp_path / "out", tokens), theirs(tmp_path / "out", tokens), atol=1e-3, rtol=1e-4
    )
    assert survey(Checkpoint.open(tmp_path / "out")).detector.disagreements == {}


def test_groups_that_divide_all_rows(tmp_path: Path) -> None:
    tiny.make(tmp_path / "made")
    done = quantize(Checkpoint.open(tmp_path / "made"), tmp_path / "out", format="int4")
    assert done.notes == ["groups of 128 do not divide every row; groups of 16 are used"]
    (group,) = quantization(tmp_path / "out")["config_groups"].values()
    assert group["weights"]["group_size"] == 16 and group["targets"] == ["Linear"]


def test_wrapped_model(tmp_path: Path) -> None:
    """The vision tower stays and is excluded by name."""
    made = tiny.make(tmp_path / "made", wrapped=True)
    quantize(Checkpoint.open(made.folder), tmp_path / "out", format="int8")
    before, after = weights(made.folder), weights(tmp_path / "out")
    tower = [name for name in before if name.startswith("model.visual.")]
    assert tower and all(torch.equal(before[name], after[name]) for name in tower)
    model, report = type(made.model).from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    tokens = tiny.random_tokens(made.vocab_size, 8, seed=5)
    with torch.no_grad():
        found = model.eval()(torch.tensor([tokens])).logits[0]
    assert torch.allclose(found, logits(tmp_path / "out", tokens), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("format", "head"), [("q8_0", "keep"), ("q4_0", "q8_0"), ("q5_1", "keep")])
def test_gguf(tmp_path: Path, format: str, head: str) -> None:
    out = tmp_path / "out.gguf"
    quantize(Checkpoint.open(EMBEDDED), out, format=format, head=head)
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(out).tensors}
    assert types["blk.0.ffn_down.weight"] == format.upper()
    assert types["blk.8.ffn_down.weight"] == ("BF16" if head == "keep" else head.upper())
    assert survey(Checkpoint.open(out), EngineConfig(mtp="on")).head_refusal is None


@pytest.mark.parametrize("format", ["int8", "q4_0"])
def test_from_gguf(tmp_path: Path, format: str) -> None:
    """A GGUF of floats is as good a source as any."""
    source = tmp_path / "tale.gguf"
    to_gguf(Checkpoint.open(EMBEDDED), source, type="bf16")
    outs = [tmp_path / f"{name}{'.gguf' if format == 'q4_0' else ''}" for name in ("one", "two")]
    for model, out in zip((source, EMBEDDED), outs, strict=True):
        quantize(Checkpoint.open(model), out, format=format)
    one, two = (tensors(out) for out in outs)
    assert one.keys() == two.keys()
    # Not the decay: its logarithm was taken and undone.
    same = [name for name in one if torch.equal(one[name][1], two[name][1])]
    assert {re.sub(r"\d+", "N", name) for name in one.keys() - set(same)} <= {"layers.N.linear_attn.A_log"}
    assert sorted(tmp_path.iterdir()) == sorted([source, *outs])


def test_quantised_sources(tmp_path: Path) -> None:
    """Refused, and by force unpacked: what is not packed again is in floats, and the old config is gone."""
    made = artifacts.make(tmp_path / "made", "nvidia--Qwen3.6-35B-A3B-NVFP4")
    source = Checkpoint.open(made.folder)
    with pytest.raises(
        CheckpointError, match=r"is quantised already \(.*\), and rounding twice .* use --force"
    ):
        quantize(source, tmp_path / "out", format="fp8")
    quantize(source, tmp_path / "out", format="fp8", force=True)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    found = survey(Checkpoint.open(tmp_path / "out"), EngineConfig(mtp="on"))
    assert found.detector.disagreements == {}
    assert found.formats["lm_head.weight"].label == "bf16"
    tokens = tiny.random_tokens(made.made.vocab_size, 10, seed=1)
    before, after = logits(made.folder, tokens), logits(tmp_path / "out", tokens)
    assert (before - after).abs().mean() < 0.2 * before.abs().mean()


def test_refusals(tmp_path: Path) -> None:
    source = Checkpoint.open(EMBEDDED)
    for out, options, message in (
        ("out", {"format": "int3"}, "--format must be one of fp8"),
        ("out", {"format": "q4_0"}, r"--format q4_0 is written to a name ending in \.gguf"),
        ("out.gguf", {"format": "int4"}, "--format int4 is written to a folder"),
        ("out", {"format": "fp8_block", "head": "int4"}, "--head int4: no quantisation config describes"),
        ("out", {"format": "int4", "head": "q8_0"}, "--format takes"),
        ("out.gguf", {"format": "q4_0", "head": "int4"}, "--head int4: a GGUF file takes keep, bf16"),
        ("out", {"format": "int4", "group_size": 0}, "--group-size must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            quantize(source, tmp_path / out, **options)  # type: ignore[arg-type]
    headless = tiny.make(tmp_path / "made", head=False).folder
    with pytest.raises(CheckpointError, match="--head int8: the checkpoint has no MTP head"):
        quantize(Checkpoint.open(headless), tmp_path / "out", format="int8", head="int8")
    quantize(Checkpoint.open(headless), tmp_path / "out", format="int8")
    with pytest.raises(CheckpointError, match="exists already"):
        quantize(Checkpoint.open(headless), tmp_path / "out", format="int8")
    with pytest.raises(CheckpointError, match="is, holds or lies in the input"):
        quantize(Checkpoint.open(headless), headless, format="int8", force=True)


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    made = tiny.make(tmp_path / "made", hidden_size=64)
    found = load_file(made.folder / "model.safetensors")
    found["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(found, made.folder / "model.safetensors")
    for format in FORMATS:
        out = tmp_path / ("out.gguf" if format.startswith("q") else "out")
        with pytest.raises(CheckpointError, match=r"ffn_up|layers\.1\.mlp\.up_proj.*not finite"):
            quantize(Checkpoint.open(made.folder), out, format=format)
        assert not out.exists()


@pytest.mark.parametrize(("format", "out"), [("int4", "out"), ("q4_0", "out.gguf")])
def test_interrupted(tmp_path: Path, format: str, out: str) -> None:
    assert_interruptible(partial(quantize, Checkpoint.open(EMBEDDED), format=format), tmp_path / out)
