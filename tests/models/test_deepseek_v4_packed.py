"""DeepSeek-V4's checkpoints as they are published and as they are packed anew: each module is read as it is stored,
whatever the config says of it; and a head in bfloat16 inside a packed model drafts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.names import canonical
from headlong.cli.main import main
from headlong.config import EngineConfig
from headlong.engine.build import Blueprint, survey
from headlong.models.deepseek_v4 import NAMING
from headlong.models.head_spec import other_drafter
from support import deepseek_v4_files as files
from support.deepseek_v4_files import Files, packs
from support.tiny import random_tokens

LABELS = {
    "nvfp4_modelopt": "nvfp4",
    "nvfp4_compressed": "nvfp4",
    "mxfp4_deepseek": "mxfp4",
    "fp8_powers": "fp8 128x128",
    "fp8_bytes": "fp8 128x128",
    "fp8_block": "fp8 128x128",
}
HEAD_PACKED = (
    (rf"mtp\.\d+\.({files.EXPERTS})", "mxfp4_deepseek"),
    (rf"mtp\.\d+\.({files.PROJECTIONS})", "fp8_bytes"),
)
INDEXER = r"layers\.\d+\.attn\.indexer\.wq_b"
KINDS: dict[str, dict[str, Any]] = {
    "head in bfloat16": {
        "how": packs("nvfp4_compressed", "fp8_block"),
        "section": files.MIXED,
        "ignore": [r"re:.*mtp\..*"],
    },
    "ignores another name": {
        "how": packs("nvfp4_compressed", "fp8_block"),
        "section": files.MIXED,
        "ignore": ["re:.*mtp_block.*"],
    },
    "head packed alike": {
        "how": packs("nvfp4_compressed", "fp8_block", head="same"),
        "section": files.MIXED,
        "ignore": [r"re:.*mtp\..*"],
    },
    "head packed otherwise": {"how": (*packs("nvfp4_modelopt"), *HEAD_PACKED), "ignore": ["mtp.*"]},
    "as published": {"how": packs("mxfp4_deepseek", head="same")},
    "as published in FP8": {"how": packs("fp8_powers", head="same")},
    "scales as bytes": {"how": (*packs("mxfp4_deepseek", "fp8_bytes", head="same"), (INDEXER, "fp8_bytes"))},
}
SELDOM = (
    "ignores another name",
    "head packed alike",
    "head packed otherwise",
    "as published in FP8",
    "scales as bytes",
)
"""Kinds whose models are loaded by slow tests alone."""
PROMPTS = [random_tokens(96, count, seed=count) for count in (3, 9, 37)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files of a kind and the folder that they are in, made when they are first asked for."""
    found: dict[str, tuple[Files, Path]] = {}

    def get(kind: str) -> tuple[Files, Path]:
        if kind not in found:
            each = files.make(**KINDS[kind])
            found[kind] = each, each.write(tmp_path_factory.mktemp("v4") / "model")
        return found[kind]

    return get


def blueprint_of(folder: Path, **options: Any) -> Blueprint:
    return survey(Checkpoint.open(folder), EngineConfig(**options))


def wanted_labels(each: Files) -> dict[str, str]:
    """The name of every matrix's format, by the canonical name."""
    found = {}
    for name, weight in each.meant.items():
        if (
            weight.dim() != 2
            or not name.endswith(".weight")
            or re.search(r"\.tok_emb|mtp\.\d+\.head\.", name)
        ):
            continue
        module = name.removesuffix(".weight")
        how = next((how for pattern, how in each.how if re.fullmatch(pattern, module)), None)
        found[str(canonical(name, NAMING))] = "bf16" if how is None else LABELS[how]
    return found


def tokens(folder: Path, drafts: int = 0, **options: Any) -> list[list[int]]:
    llm = LLM(folder, device="cpu", dtype="float32", **options)
    params = SamplingParams(max_tokens=12, ignore_eos=True, draft_tokens=drafts)
    done = llm.generate(PROMPTS, params)
    assert all(bool(each.stats.drafted) == (drafts > 0) for each in done)
    return [list(each.token_ids) for each in done]


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_is_read_as_it_is_stored(made, kind):
    each, folder = made(kind)
    blueprint = blueprint_of(folder)
    assert blueprint.head_refusal is None
    assert {name: format.label for name, format in blueprint.formats.items()} == wanted_labels(each)
    assert sorted(name for name, _ in blueprint.names.copies) == ["embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SELDOM)) for kind in KINDS]
)
def test_tokens_are_those_of_the_floats_it_stands_for(made, kind, tmp_path):
    """And the same with drafts, of which some are accepted or none: the head decides nothing."""
    each, folder = made(kind)
    plain = tokens(folder)
    assert tokens(folder, drafts=3) == plain
    assert tokens(each.write_meant(tmp_path / "meant")) == plain


def test_the_config_is_corrected_where_it_says_otherwise(made):
    """A list that names the head's modules under another name leaves them to the groups, which claim them."""
    told = {
        kind: blueprint_of(made(kind)[1]).detector.disagreements
        for kind in ("head in bfloat16", "ignores another name")
    }
    in_head = {
        kind: {name: sentence for name, sentence in found.items() if name.startswith("mtp.")}
        for kind, found in told.items()
    }
    assert in_head["head in bfloat16"] == {}
    sentences = in_head["ignores another name"]
    assert len(sentences) == 4 * 3 + 3 + 5
    expert = "the config says nvfp4 (group_0 targets 're:.*ffn\\\\.experts\\\\..*'), the tensors are bf16"
    assert sentences["mtp.layers.0.mlp.experts.3.up_proj"] == expert
    assert sentences["mtp.layers.0.self_attn.q_a_proj"].endswith("the tensors are bf16")
    assert not any(name.startswith("layers.") for found in told.values() for name in found)


LIES = {
    "deepseek-ai--DeepSeek-V4-Flash": ("mlp.experts", "compressor", "mlp.gate"),
    "sgl-project--DeepSeek-V4-Flash-FP8": ("compressor", "mlp.gate"),
    "nvidia--DeepSeek-V4-Flash-NVFP4": ("self_attn.", "mlp.shared_expert", "mlp.gate", "mtp."),
}
"""Parts of the names of modules of which a published config says otherwise, or nothing."""


@pytest.mark.parametrize("name", files.RELEASES)
def test_published_configs(tmp_path, name):
    """With their own config the tensors are read as they are, and it is corrected where it says otherwise."""
    each = files.write_release(tmp_path, name)
    blueprint = blueprint_of(tmp_path, mtp="on")
    assert {name: format.label for name, format in blueprint.formats.items()} == wanted_labels(each)
    assert all(any(part in module for part in LIES[name]) for module in blueprint.detector.disagreements)
    for part in LIES[name]:
        assert any(part in module for module in blueprint.detector.disagreements), part
    if name.startswith("nvidia"):
        assert tokens(tmp_path, drafts=2) == tokens(tmp_path)


@pytest.mark.parametrize("repack", ["none", "fp8", "int8", "int4"])
def test_draft_quantization_overrides(made, repack):
    """What it is turned into on load, whether it is stored packed or not; tokens are the target's."""
    for kind in ("head in bfloat16", "as published"):
        blueprint = blueprint_of(made(kind)[1], draft_quantization=repack)
        assert blueprint.repacked_head == repack and blueprint.head_refusal is None
    folder = made("head in bfloat16")[1]
    if repack == "int4":
        assert tokens(folder, drafts=2, draft_quantization=repack) == tokens(folder)


def test_a_model_without_a_head(tmp_path):
    folder = files.make(packs("mxfp4_deepseek"), head=False).write(tmp_path)
    blueprint = blueprint_of(folder)
    assert blueprint.head_refusal is not None and "has no MTP head" in blueprint.head_refusal
    assert not blueprint.detector.disagreements.keys() & {"head", "lm_head"}


def with_dspark(each: Files) -> Files:
    """The blocks that later releases have under the head's name."""
    block = {name: weight for name, weight in each.stored.items() if re.match(r"mtp\.0\.(attn|ffn|hc)", name)}
    kept = {name: weight for name, weight in each.stored.items() if not name.startswith("mtp.")}
    for number in range(3):
        kept |= {name.replace("mtp.0.", f"mtp.{number}."): weight.clone() for name, weight in block.items()}
    size = each.config["hidden_size"]
    kept |= {
        "mtp.0.main_proj.weight": torch.ones(size, 3 * size).bfloat16(),
        "mtp.0.main_norm.weight": torch.ones(size).bfloat16(),
        "mtp.2.norm.weight": torch.ones(size).bfloat16(),
        "mtp.2.markov_head.markov_w1.weight": torch.ones(96, 8).bfloat16(),
        "mtp.2.markov_head.markov_w2.weight": torch.ones(8, 96).bfloat16(),
        "mtp.2.confidence_head.proj.weight": torch.ones(1, size).bfloat16(),
    }
    return Files(each.config | {"dspark_block_size": 5, "n_mtp_layers": 3}, kept, each.meant, each.how)


def test_blocks_of_dspark_are_no_head(made, tmp_path, capsys):
    """They are named in one sentence, and the model is served without them."""
    each, folder = made("as published")
    later = with_dspark(each).write(tmp_path / "later")
    llm = LLM(later, device="cpu", dtype="float32")
    assert llm.mtp_refusal == (
        "the blocks named mtp.* are DSpark's: there are main_proj, markov_head, confidence_head and no join of "
        "embedding and hidden state; such a drafter is no MTP head and not supported"
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert [list(done.token_ids) for done in llm.generate(PROMPTS, params)] == tokens(folder)
    assert main(["inspect", "--json", str(later)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["servable"] and found["head"]["reason"] == llm.mtp_refusal
    assert not found["head"]["usable"]


def test_what_dspark_is_told_by():
    assert other_drafter(["mtp.layers.0.main_proj.weight", "mtp.layers.2.markov_head.markov_w1.weight"])
    assert other_drafter(["mtp.layers.0.main_proj.weight", "mtp.layers.0.fc.weight"]) is None
    assert (
        other_drafter(
            ["mtp.layers.0.main_proj.weight", "mtp.layers.0.markov_head.x", "mtp.layers.0.fc_hidden.weight"]
        )
        is None
    )
    assert other_drafter(["mtp.fc.weight"]) is None


def test_inspect_tells_of_every_module(made, capsys):
    each, folder = made("head in bfloat16")
    assert main(["inspect", "--json", "--all", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["head"]["usable"] and found["servable"]
    told = {module["name"]: module["format"].lower() for module in found["modules"]}
    for name, label in wanted_labels(each).items():
        assert told[name] == label, name
    stored = sum(tensor.nbytes for name, tensor in each.stored.items() if not name.startswith("mtp."))
    assert found["bytes"]["target"] == stored
