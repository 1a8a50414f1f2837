"""Heads that their families number among the model's layers, or name otherwise: every command on them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.config import EngineConfig
from headlong.convert.extract import extract
from headlong.convert.graft import graft
from headlong.convert.quantize import quantize
from headlong.convert.strip import strip
from headlong.convert.to_gguf import to_gguf
from headlong.engine.build import survey
from headlong.errors import HeadError
from support import tiny
from support.packing import pack
from support.steps import Driver, load
from support.written import assert_same

FAMILIES = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "mimo")
IN_GGUF = FAMILIES[:-1]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "num_hidden_layers": 2}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64}
LATENTS: dict[str, Any] = EXPERTS | {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
OWN: dict[str, dict[str, Any]] = {
    "glm4_moe": EXPERTS,
    "deepseek_v3": LATENTS,
    "glm4_moe_lite": LATENTS,
    "mimo": {},
}
FORMATS = ("fp8", "fp8_block", "int8", "int4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        made = tiny.make(folder / family, family, seed=3, experts="apart", **SIZES, **OWN[family])
        stored = {name: weight.bfloat16() for name, weight in tiny.tensors(made, "apart").items()}
        tiny.write(made.folder, tiny.read_config(made.folder), stored)
    return {family: folder / family for family in FAMILIES}


def drafts(path: Path) -> list[int]:
    driver = Driver(load(path, "float64", mtp="on"))
    driver.open("row", tiny.random_tokens(64, 20, seed=4))
    driver.feed("row", [12])
    return driver.propose("row", 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_under_its_own_names(models: dict[str, Path], tmp_path: Path, family: str) -> None:
    """What other engines look for: a grafted head is called what the release calls it."""
    model, head = models[family], tmp_path / "mtp.safetensors"
    extract(Checkpoint.open(model), head)
    original, found = load_file(model / "model.safetensors"), load_file(head)
    assert found.keys() < original.keys() and not any(name.startswith("mtp.") for name in found)
    strip(Checkpoint.open(model), tmp_path / "bare")
    left = load_file(tmp_path / "bare" / "model.safetensors")
    copies = original.keys() - found.keys() - left.keys()
    assert all(re.search(r"\.2\.(embed_tokens|shared_head\.head)\.weight", name) for name in copies)
    graft(tmp_path / "bare", head, tmp_path / "whole")
    assert_same(model, tmp_path / "whole")
    assert drafts(tmp_path / "whole") == drafts(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shard_with_the_head_and_nothing_else_is_one(
    models: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """It says neither family nor layers: the model that it is put onto does."""
    strip(Checkpoint.open(models[family]), tmp_path / "bare")
    weights = load_file(models[family] / "model.safetensors")
    kept = load_file(tmp_path / "bare" / "model.safetensors")
    save_file({name: w for name, w in weights.items() if name not in kept}, tmp_path / "shard.safetensors")
    graft(tmp_path / "bare", tmp_path / "shard.safetensors", tmp_path / "whole")
    assert drafts(tmp_path / "whole") == drafts(models[family])


@pytest.mark.parametrize("family", IN_GGUF)
def test_between_containers(models: dict[str, Path], tmp_path: Path, family: str) -> None:
    """GLM-4.7-Flash and DeepSeek-V3 are one architecture there, so a head's file does not tell which of them it is."""
    whole, bare, wanted = Checkpoint.open(models[family]), tmp_path / "bare", drafts(models[family])
    strip(whole, bare)
    (tmp_path / "apart").mkdir()
    heads = [tmp_path / "apart" / f"mtp-head.{ending}" for ending in ("gguf", "safetensors")]
    for head in heads:
        extract(whole, head, head_type="f32")
    to_gguf(Checkpoint.open(bare), tmp_path / "apart" / "bare.gguf", type="f32")
    for number, head in enumerate(heads):
        for base in (bare, tmp_path / "apart" / "bare.gguf"):
            out = tmp_path / f"{number}-{base.name}.gguf"
            graft(base, head, out, head_type="f32")
            assert drafts(out) == wanted
    graft(tmp_path / "0-bare.gguf", heads[1], tmp_path / "folder", force=True)
    strip(Checkpoint.open(tmp_path / "0-bare.gguf"), tmp_path / "again.gguf")
    assert drafts(tmp_path / "folder") == wanted
    assert survey(Checkpoint.open(tmp_path / "again.gguf")).head_refusal is not None


def test_families_of_another_architecture_do_not_fit(models: dict[str, Path], tmp_path: Path) -> None:
    head = tmp_path / "mtp-head.gguf"
    extract(Checkpoint.open(models["deepseek_v3"]), head)
    with pytest.raises(HeadError, match=r"is the head of a deepseek2 model, but .* is a glm4moe model"):
        graft(models["glm4_moe"], head, tmp_path / "out", force=True)
    with pytest.raises(HeadError, match=r"is the head of a deepseek_v3 model, but .* is a glm4_moe model"):
        graft(models["glm4_moe"], models["deepseek_v3"], tmp_path / "out", force=True)


QUANTISED = [(family, format) for family in FAMILIES for format in FORMATS]


@pytest.mark.parametrize(
    ("family", "format"),
    [
        pytest.param(*case, marks=() if number % 5 == 0 else pytest.mark.slow)
        for number, case in enumerate(QUANTISED)
    ],
)
def test_quantised(models: dict[str, Path], tmp_path: Path, family: str, format: str) -> None:
    """Its config tells what its tensors are, the head packed or not, and drafts change no token."""
    for head in ("keep", format):
        out = tmp_path / head
        quantize(Checkpoint.open(models[family]), out, format=format, head=head, group_size=32)
        blueprint = survey(Checkpoint.open(out), EngineConfig(mtp="on"))
        assert not blueprint.detector.disagreements
        label = blueprint.formats[
            "mtp.layers.0.mlp.experts.1.up_proj.weight"
            if family != "mimo"
            else "mtp.layers.0.mlp.up_proj.weight"
        ].label
        assert label.startswith("bf16" if head == "keep" else format[:3])
        llm = LLM(out, device="cpu", mtp="on", cache_tokens=1024, max_context=128)
        prompts = [tiny.random_tokens(64, count, seed=count) for count in (3, 20)]
        runs = [
            [
                c.token_ids
                for c in llm.generate(
                    prompts, SamplingParams(max_tokens=8, ignore_eos=True, draft_tokens=depth)
                )
            ]
            for depth in (0, 3)
        ]
        assert runs[0] == runs[1]


def mlx_packed(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The model in `folder / "mlx"` with these halves in eight bits."""
    stored = {}
    for name, weight in weights.items():
        if name.endswith(("embed_q.weight", "unembed_out.weight")):
            each = [pack(head, "mlx8") for head in weight]
            stem = name.removesuffix("weight")
            stored |= {stem + part: torch.stack([one[part] for one in each]) for part in each[0]}
        else:
            stored[name] = weight
    tiny.write(folder / "packed", tiny.read_config(folder / "mlx"), stored)
    return folder / "packed"


def test_halves_by_head_stay_as_they_are(tmp_path: Path) -> None:
    """What makes keys and values of latents, as MLX has it: no packed format has a tensor for each head."""
    made = tiny.make(tmp_path / "made", "deepseek_v3", seed=3, head=False, **SIZES, **LATENTS)
    c, stored = made.model.config, {}
    for name, weight in tiny.tensors(made, "apart").items():
        if name.endswith("kv_b_proj.weight"):
            heads = weight.view(c.num_attention_heads, -1, c.kv_lora_rank)
            keys, values = heads.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
            stored[name.replace("kv_b_proj", "embed_q")] = keys.mT.contiguous()
            stored[name.replace("kv_b_proj", "unembed_out")] = values.contiguous()
        else:
            stored[name] = weight
    tiny.write(tmp_path / "mlx", tiny.read_config(made.folder), stored)
    for source in ("made", "mlx"):
        quantize(Checkpoint.open(tmp_path / source), tmp_path / f"{source}-int8", format="int8")
    formats = survey(Checkpoint.open(tmp_path / "mlx-int8")).formats
    assert formats["layers.0.self_attn.k_b_proj.weight"].label == "f32"
    assert formats["layers.0.self_attn.q_a_proj.weight"].label.startswith("int8")
    quantize(
        Checkpoint.open(mlx_packed(tmp_path, stored)), tmp_path / "packed-int8", format="int8", force=True
    )
    script, found = tiny.random_tokens(64, 20, seed=4), []
    for folder in ("made-int8", "mlx-int8", "packed-int8"):
        driver = Driver(load(tmp_path / folder))
        driver.open("row", script)
        found.append(driver.feed("row", [19]).logits)
    for logits in found[1:]:
        assert torch.nn.functional.cosine_similarity(logits, found[0], dim=1).min() > 0.99
