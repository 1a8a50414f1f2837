"""`graft`: heads from everywhere onto models in every container and packing, and every pair that does not fit."""

import json
import re
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.checkpoint.tensor_info import read_tensor
from headlong.config import EngineConfig
from headlong.convert.extract import extract
from headlong.convert.from_gguf import from_gguf
from headlong.convert.graft import graft
from headlong.convert.quantize import quantize
from headlong.convert.strip import strip
from headlong.convert.to_gguf import to_gguf
from headlong.engine.build import Blueprint, survey
from headlong.errors import CheckpointError, HeadError
from headlong.models import registry
from support import artifacts, llama_cpp, packing, tiny, tiny_llama
from support.steps import Driver, load
from support.written import DEPTH, PROMPTS, assert_interruptible, command, greedy, tensors

ALIKE = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
PACKED = [name for name, release in artifacts.RELEASES.items() if release.packs]
EXCLUSIONS = ("modules_to_not_convert", "ignore", "exclude_modules", "dynamic")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model without its head and the head alone, in both containers and out of each other's sight."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "head").mkdir()
    tale = Checkpoint.open(EMBEDDED)
    strip(tale, folder / "bare")
    extract(tale, folder / "head" / "mtp.safetensors")
    to_gguf(tale, folder / "whole.gguf", type="q8_0")
    whole = Checkpoint.open(folder / "whole.gguf")
    strip(whole, folder / "bare.gguf")
    extract(whole, folder / "head" / "mtp-tale.gguf")
    return folder


def checked(path: Path) -> Blueprint:
    return survey(Checkpoint.open(path), EngineConfig(mtp="on"))


def logits(path: Path, tokens: list[int]) -> torch.Tensor:
    driver = Driver(load(path))
    driver.open("row", [*tokens, 0])
    return driver.feed("row", [len(tokens)]).logits


def drafts(path: Path, tokens: list[int]) -> list[int]:
    driver = Driver(load(path, mtp="on"))
    driver.open("row", [*tokens, 0])
    driver.feed("row", [len(tokens)])
    return driver.propose("row", 4)


@pytest.mark.parametrize("name", PACKED)
def test_floats_on_every_packing(tmp_path: Path, name: str) -> None:
    """A plain head in place of whatever the release had: the config then says of no module of it that it is packed."""
    made = artifacts.make(tmp_path / "made", name)
    out = tmp_path / "out"
    graft(made.folder, made.folder / "floats", out, force=True)
    stored = registry.names_of(Checkpoint.open(made.folder / "floats")).sources
    donor = {info.name: read_tensor(info) for name, info in stored.items() if name.startswith("mtp.")}
    head = load_file(out / "mtp.safetensors")
    assert head.keys() == donor.keys() != set()
    assert all(torch.equal(head[name], donor[name]) for name in head)
    found = checked(out)
    assert not [module for module in found.detector.disagreements if module.startswith("mtp.")]
    before, after = tensors(made.folder), tensors(out)
    for name, (dtype, data) in before.items():
        if not name.startswith("mtp."):
            assert after[name][0] == dtype and torch.equal(after[name][1], data), name
    tokens = tiny.random_tokens(made.made.vocab_size, 12, seed=2)
    assert torch.equal(logits(out, tokens), logits(made.folder, tokens))


@pytest.mark.parametrize(
    ("name", "key", "entry"),
    [
        ("AutoRound--Qwen3.6-27B-W4A16-GPTQ", "dynamic", r"-:.*mtp\.fc(\..*)?$"),
        ("llm-compressor--Qwen3.5-27B-W4A16", "ignore", "mtp.fc"),
        ("Qwen--Qwen3.6-27B-FP8", "modules_to_not_convert", "mtp.layers.0.self_attn.q_proj"),
        ("nvidia--Qwen3.5-397B-A17B-NVFP4", "ignore", "mtp.fc"),
    ],
)
def test_words_of_each_method(tmp_path: Path, name: str, key: str, entry: str) -> None:
    made = artifacts.make(tmp_path / "made", name)
    graft(made.folder, made.folder / "floats", tmp_path / "out", force=True)
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if key == "ignore" and "ignore" not in quantization:
        key = next(key for key in EXCLUSIONS if key in quantization)
    assert entry in quantization[key] or any(
        rule.startswith("re:") and re.match(rule[3:], "mtp.fc") for rule in quantization[key]
    )
    if key == "dynamic":
        assert next(iter(quantization[key])).startswith("-:")


@pytest.mark.parametrize("name", ["Qwen--Qwen3.6-27B-FP8", "mlx-community--Qwen3.5-35B-A3B-4bit"])
def test_packed_head_stays_packed(tmp_path: Path, name: str) -> None:
    """All its parts go along, onto a model that says nothing of quantisation."""
    made = artifacts.make(tmp_path / "made", name)
    graft(made.folder / "floats", made.folder, tmp_path / "out", force=True)
    before, after = tensors(made.folder), tensors(tmp_path / "out")
    for part, (dtype, data) in before.items():
        if part.startswith("mtp."):
            assert after[part][0] == dtype and torch.equal(after[part][1], data), part
    old, new = checked(made.folder), checked(tmp_path / "out")
    for module, format in old.formats.items():
        if module.startswith("mtp."):
            assert new.formats[module] == format


@pytest.mark.parametrize(
    "how",
    ["int4_g32", "gptq_v1", "awq", "nf4_nested", "torchao_int8", "mxfp4_blocks", "modelopt_int4_smooth"],
)
def test_a_packed_head_goes_along_and_back(tmp_path: Path, how: str) -> None:
    """Onto floats with all its parts, `weight` among them or not; and floats go onto a model of such."""
    made, packed = with_a_packed_head(tmp_path, how)
    graft(made.folder, packed, tmp_path / "out", force=True)
    old, new = checked(packed), checked(tmp_path / "out")
    assert new.formats == old.formats and new.formats["mtp.fc.weight"].bits < 9
    graft(packed, made.folder, tmp_path / "back", force=True)
    assert checked(tmp_path / "back").formats == checked(made.folder).formats


@pytest.mark.parametrize("how", ["int4_g32", "gptq_v1"])
def test_a_head_that_is_not_what_the_config_promises(tmp_path: Path, how: str) -> None:
    """Symmetric codes in runs of columns, onto a model whose config says that all have zero points and an order."""
    made, packed = with_a_packed_head(tmp_path, how)
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "actorder": "group", "group_size": 32}
    compressed = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"]}}}
    compressed["config_groups"]["g"]["weights"] = weights
    section = {"quant_method": "gptq", "bits": 4, "desc_act": True, "sym": False}
    base = tmp_path / "base"
    section = compressed if how == "int4_g32" else section
    tiny.write(base, tiny.read_config(made.folder) | {"quantization_config": section}, tiny.tensors(made))
    graft(base, packed, tmp_path / "out", force=True)
    assert checked(tmp_path / "out").formats["mtp.fc.weight"].bits < 9


def test_a_head_that_only_its_own_config_can_tell(tmp_path: Path) -> None:
    """Quark's four bits: the model that it goes onto has no such config, so nothing is written."""
    made, packed = with_a_packed_head(tmp_path, "quark_uint4")
    says = {"global_quant_config": {"weight": {"dtype": "uint4"}}, "export": {"pack_method": "reorder"}}
    config = tiny.read_config(packed) | {"quantization_config": {"quant_method": "quark", **says}}
    (packed / "config.json").write_text(json.dumps(config))
    assert checked(packed).formats["mtp.fc.weight"].label.startswith("quark int4")
    with pytest.raises(HeadError, match="can be read in several ways: quantization_config must say"):
        graft(made.folder, packed, tmp_path / "out", force=True)
    assert not (tmp_path / "out").exists()


def with_a_packed_head(tmp_path: Path, how: str) -> tuple[tiny.Tiny, Path]:
    made = tiny.make(tmp_path / "made", "dense", hidden_size=64, intermediate_size=128, head_dim=16)
    stored = {}
    for name, weight in tiny.tensors(made).items():
        is_packed = name.startswith("mtp.") and weight.dim() == 2 and weight.shape[0] >= 32
        parts = packing.pack(weight, how) if is_packed else {}
        stem = name.removesuffix("weight")
        stored |= {stem + part: tensor for part, tensor in parts.items()} or {name: weight}
    (tmp_path / "packed").mkdir()
    tiny.write(tmp_path / "packed", tiny.read_config(made.folder), stored)
    return made, tmp_path / "packed"


@pytest.mark.parametrize("head", ["mtp.safetensors", "mtp-tale.gguf"])
@pytest.mark.parametrize("base", ["bare", "bare.gguf"])
@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_every_container(parts: Path, tmp_path: Path, base: str, head: str, out: str) -> None:
    """The model's logits are the base's, and the head drafts what the embedded model's drafts."""
    done = graft(parts / base, parts / "head" / head, tmp_path / out, head_type="q8_0")
    assert done.has_head and done.path == tmp_path / out
    found, drafted = answers(tmp_path / out)
    # From safetensors to GGUF all norms take a detour over 1 + w.
    assert torch.allclose(found, answers(parts / base)[0], atol=1e-3)
    assert drafted == answers(EMBEDDED)[1]
    if base == "bare.gguf" and out == "out":
        beside = "mtp-bare.gguf" if head.endswith(".gguf") else "mtp.safetensors"
        assert {file.name for file in (tmp_path / out).iterdir()} == {"bare.gguf", beside}
        assert (tmp_path / out / "bare.gguf").read_bytes() == (parts / "bare.gguf").read_bytes()


@cache
def answers(path: Path) -> tuple[torch.Tensor, list[int]]:
    """Logits after a prompt, and what the head, if there is one, drafts behind it."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    chat = [{"role": "user", "content": PROMPTS[0]}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    built = load(path)
    driver = Driver(built)
    driver.open("row", [*tokens, 0])
    found = driver.feed("row", [len(tokens)]).logits
    return found, driver.propose("row", 4) if built.head is not None else []


@pytest.mark.parametrize("type", ["bf16", "q4_0"])
def test_head_type(parts: Path, tmp_path: Path, type: str) -> None:
    """Matrices take it, norms are F32, and the model's tensors stay byte for byte."""
    out = tmp_path / "out.gguf"
    words = ("graft", str(parts / "bare.gguf"), str(parts / "head" / "mtp.safetensors"), "-o", str(out))
    assert command(*words, "--head-type", type) == 0
    stored, before = ({t.name: t for t in GGUFReader(path).tensors} for path in (out, parts / "bare.gguf"))
    for name, tensor in before.items():
        assert stored[name].tensor_type == tensor.tensor_type and np.array_equal(
            stored[name].data, tensor.data
        )
    head = {name: tensor for name, tensor in stored.items() if name not in before}
    assert all(name.startswith("blk.8.") for name in head) and len(head) == 15
    for name, tensor in head.items():
        assert tensor.tensor_type.name == ("F32" if "norm" in name else type.upper()), name
    fields = GGUFReader(out).fields
    assert fields["qwen35.block_count"].contents() == 9
    assert fields["qwen35.nextn_predict_layers"].contents() == 1


def test_in_llama_cpp(parts: Path, tmp_path: Path) -> None:
    """A head from safetensors on a Q8_0 model drafts there, and plain decoding gives the same tokens."""
    out = tmp_path / "out.gguf"
    graft(parts / "bare.gguf", parts / "head" / "mtp.safetensors", out, head_type="q8_0")
    prompt = list(range(40, 60))
    (plain,), (drafting,) = (
        llama_cpp.generate(out, [prompt], 32, draft_tokens=depth) for depth in (0, DEPTH)
    )
    assert drafting.tokens == plain.tokens and drafting.drafted > 0
    (whole,) = llama_cpp.generate(parts / "whole.gguf", [prompt], 32, draft_tokens=DEPTH)
    assert (drafting.tokens, drafting.accepted) == (whole.tokens, whole.accepted)


def test_experts_between_containers(tmp_path: Path) -> None:
    """Gate and up of the experts are one tensor in safetensors and two in GGUF."""
    made = tiny.make(tmp_path / "made", "moe", **ALIKE)
    whole = Checkpoint.open(made.folder)
    to_gguf(whole, tmp_path / "whole.gguf", type="f32")
    strip(whole, tmp_path / "bare")
    strip(Checkpoint.open(tmp_path / "whole.gguf"), tmp_path / "bare.gguf")
    graft(tmp_path / "bare.gguf", made.folder, tmp_path / "one.gguf", head_type="f32")
    assert tensors(tmp_path / "one.gguf").keys() == tensors(tmp_path / "whole.gguf").keys()
    from_gguf(Checkpoint.open(tmp_path / "one.gguf"), tmp_path / "back", type="f32")
    graft(tmp_path / "bare", tmp_path / "whole.gguf", tmp_path / "other")
    original = load_file(made.folder / "model.safetensors")
    back, other = (
        load_file(tmp_path / "back" / "model.safetensors"),
        load_file(tmp_path / "other" / "mtp.safetensors"),
    )
    for name, weight in original.items():
        if name.startswith("mtp."):
            assert torch.allclose(back[name], weight, atol=1e-6), name
            assert torch.allclose(other[name].float(), weight, rtol=2**-8, atol=1e-6), name


def test_llama(tmp_path: Path) -> None:
    """llama.cpp has no place for its head, so it lies beside the file; onto a folder it goes as always."""
    made = tiny_llama.make(tmp_path / "made")
    strip(Checkpoint.open(made.folder), tmp_path / "bare")
    (tmp_path / "apart").mkdir()
    to_gguf(Checkpoint.open(tmp_path / "bare"), tmp_path / "apart" / "bare.gguf", type="f32")
    with pytest.raises(CheckpointError, match=r"llama\.cpp knows no MTP head for a llama; name a folder"):
        graft(tmp_path / "apart" / "bare.gguf", made.folder, tmp_path / "out.gguf")
    with pytest.raises(CheckpointError, match=r"llama\.cpp knows no MTP head for a llama; name a folder"):
        graft(tmp_path / "bare", made.folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
    graft(tmp_path / "apart" / "bare.gguf", made.folder, tmp_path / "beside")
    graft(tmp_path / "bare", made.folder, tmp_path / "folder")
    tokens = tiny.random_tokens(made.vocab_size, 9, seed=4)
    assert (
        drafts(tmp_path / "beside", tokens)
        == drafts(tmp_path / "folder", tokens)
        == drafts(made.folder, tokens)
    )


MISFITS: dict[str, tuple[str, dict[str, Any], str]] = {
    "hidden size": ("dense", {"hidden_size": 32}, "hidden_size 32, but .* has 48"),
    "vocabulary": ("dense", {"vocab_size": 101}, "vocab_size 101, but .* has 97"),
    "layers": (
        "dense",
        {"num_hidden_layers": 2, "layer_types": [tiny.FULL, tiny.LINEAR]},
        "num_hidden_layers 2, but .* has 3",
    ),
    "heads": ("dense", {"num_attention_heads": 6}, "num_attention_heads 6, but .* has 4"),
    "key heads": ("dense", {"num_key_value_heads": 4}, "num_key_value_heads 4, but .* has 2"),
    "head size": ("dense", {"head_dim": 8}, "head_dim 8, but .* has 16"),
    "MLP": ("dense", {"intermediate_size": 64}, "intermediate_size 64, but .* has 80"),
    "family": ("moe", {}, "is the head of a qwen3_5_moe model, but .* is a qwen3_5 model"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("base") / "base", head=False).folder


@pytest.mark.parametrize("difference", MISFITS)
def test_what_does_not_fit(base: Path, tmp_path: Path, difference: str) -> None:
    """Told by a whole model, by a file of the head that says what it is of, and, as far as shapes tell, by one that
    does not."""
    family, sizes, message = MISFITS[difference]
    made = tiny.make(tmp_path / "made", family, **sizes)
    extract(Checkpoint.open(made.folder), tmp_path / "mtp.safetensors")
    save_file(load_file(tmp_path / "mtp.safetensors"), tmp_path / "bare.safetensors")
    for head in (made.folder, tmp_path / "mtp.safetensors"):
        with pytest.raises(HeadError, match=message) as caught:
            graft(base, head, tmp_path / "out")
        assert "\n" not in str(caught.value)
    if difference in ("vocabulary", "layers"):
        graft(base, tmp_path / "bare.safetensors", tmp_path / "out")
        return
    with pytest.raises(HeadError, match="but .* needs" if family == "dense" else "does not fit its model"):
        graft(base, tmp_path / "bare.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_refusals(base: Path, parts: Path, tmp_path: Path) -> None:
    with_head = tiny.make(tmp_path / "made").folder
    with pytest.raises(HeadError, match="base: has no MTP head"):
        graft(with_head, base, tmp_path / "out")
    with pytest.raises(HeadError, match="has an MTP head already; use --force to replace it"):
        graft(with_head, with_head, tmp_path / "out")
    with pytest.raises(HeadError, match="has an MTP head already"):
        graft(parts / "whole.gguf", parts / "head" / "mtp.safetensors", tmp_path / "out.gguf")
    for out in (with_head, with_head / "out", tmp_path):
        with pytest.raises(CheckpointError, match="is, holds or lies in the input"):
            graft(base, with_head, out, force=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    for force, message in ((False, "exists already"), (True, "holds more than a checkpoint")):
        with pytest.raises(CheckpointError, match=message):
            graft(base, with_head, tmp_path / "out", force=force)
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


def test_replaced_head(parts: Path, tmp_path: Path) -> None:
    """--force: the old head is gone, wherever it was."""
    tale = Checkpoint.open(EMBEDDED)
    weights = {name: tale.read(info.name) for name, info in tale.tensors.items() if name.startswith("mtp.")}
    changed = {name: weight + 1 for name, weight in weights.items()}
    save_file(changed, tmp_path / "mtp.safetensors")
    graft(EMBEDDED, tmp_path / "mtp.safetensors", tmp_path / "out", force=True)
    graft(parts / "whole.gguf", tmp_path / "mtp.safetensors", tmp_path / "beside", force=True)
    graft(parts / "whole.gguf", tmp_path / "mtp.safetensors", tmp_path / "out.gguf", force=True)
    for folder in (tmp_path / "out", tmp_path / "beside"):
        found = tensors(folder)
        for name, weight in changed.items():
            assert torch.equal(found[name][1], weight.view(-1).view(torch.uint8)), name
    stored = {t.name: t for t in GGUFReader(tmp_path / "out.gguf").tensors}
    norm = torch.from_numpy(np.array(stored["blk.8.nextn.shared_head_norm.weight"].data))
    assert torch.equal(norm, changed["mtp.norm.weight"].float() + 1)


def test_broken_result_gets_no_name(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is looked at before it is renamed."""
    monkeypatch.setattr("headlong.convert.graft.safetensors_head", lambda _: [])
    with pytest.raises(CheckpointError, match="has no MTP head"):
        graft(parts / "bare", EMBEDDED, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("base", "out"), [("bare", "out"), ("bare", "out.gguf"), ("bare.gguf", "out")])
def test_interrupted(parts: Path, tmp_path: Path, base: str, out: str) -> None:
    assert_interruptible(partial(graft, parts / base, parts / "whole.gguf"), tmp_path / out)


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_on_another_quantisation(parts: Path, tmp_path: Path, format: str) -> None:
    """The head of the original on a rounded model: the tokens of plain decoding, and nearly as many drafts accepted."""
    quantize(Checkpoint.open(parts / "bare"), tmp_path / "packed", format=format)
    graft(tmp_path / "packed", EMBEDDED, tmp_path / "out")
    drafted, share = greedy(tmp_path / "out", "on")
    plain, _ = greedy(tmp_path / "packed", "off")
    assert drafted == plain
    _, usual = greedy(EMBEDDED, "on")
    assert share > usual - 0.05
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "mtp.fc" in quantization["ignore"]
    shutil.rmtree(tmp_path / "packed")
