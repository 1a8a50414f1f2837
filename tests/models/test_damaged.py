"""Safetensors checkpoints damaged in every way: one clear error, or, where only the head is, a plain engine that says
why.

Each case takes a good folder, breaks one thing in it and names what the message must say. The container alone is
fuzzed in tests/checkpoint; GGUF files have a file of their own.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import artifacts, damage, tiny
from support.damage import (
    INF,
    LFS,
    NAN,
    ONE,
    SIDECAR,
    Case,
    Damage,
    Good,
    config,
    cut,
    extra,
    fewer,
    filled,
    gone,
    header,
    instead,
    put,
    raw_header,
    tensor,
    u64,
)

FIRST = "model-00001-of-00001.safetensors"
TEXT = "model.language_model."
GATE = TEXT + "layers.0.mlp.gate_proj"
DOWN = TEXT + "layers.1.mlp.down_proj"
LAST = "mtp.pre_fc_norm_hidden.weight"
HEAD_GATE = "mtp.layers.0.mlp.gate_proj"
DEEP = b'{"a":' * 50_000
FIT = r"the model does not fit its model(?s:.*)"


def forget(name: str) -> Damage:
    """A tensor taken out of its shard and left in the index."""

    def change(folder: Path) -> None:
        for file in folder.glob("model-*.safetensors"):
            save_file({key: weight for key, weight in load_file(file).items() if key != name}, file)

    return change


CONTAINERS: dict[str, Case] = {
    "cut in the length": ("plain", cut(ONE, 5), rf"{ONE}: 5 bytes is too short"),
    "cut in the header": ("plain", cut(ONE, 300), rf"{ONE}: the header claims \d+ bytes of a 300-byte file"),
    "cut in the data": ("plain", cut(ONE, 0.5), rf"{ONE}: tensor '.*truncated"),
    "cut by one byte": ("plain", cut(ONE, -1), rf"{ONE}: tensor '.*truncated"),
    "empty": ("plain", cut(ONE, 0), rf"{ONE}: 0 bytes is too short"),
    "bytes too many": ("plain", lambda f: (f / ONE).open("ab").write(b"x"), rf"{ONE}: 1 unowned bytes after"),
    "a length of 2**63": (
        "plain",
        put(ONE, u64(2**63) + b"{}"),
        rf"{ONE}: the header claims 9223372036854775808",
    ),
    "no JSON": ("plain", raw_header(b"{]"), rf"{ONE}: header: not valid JSON"),
    "not UTF-8": ("plain", raw_header(b'{"\xff": 1}'), rf"{ONE}: header: not valid JSON"),
    "nested without end": (
        "plain",
        raw_header(DEEP),
        rf"{ONE}: header: (JSON nested too deeply|not valid JSON)",
    ),
    "a tensor twice": ("plain", raw_header(b'{"a": {}, "a": {}}'), rf"{ONE}: header: .*'a' occurs twice"),
    "a number for a tensor": (
        "plain",
        header(lambda h: h.update({GATE: 3})),
        rf"{ONE}: tensor '{GATE}.*object",
    ),
    "2**40 elements": (
        "plain",
        header(lambda h: h[f"{GATE}.weight"].update(shape=[2**20, 2**20])),
        rf"{ONE}: tensor '{GATE}\.weight': \d+ bytes stored, but BF16 .* takes 2199023255552",
    ),
    "a product that overflows": (
        "plain",
        header(lambda h: h[f"{GATE}.weight"].update(shape=[2**32, 2**32, 64])),
        rf"{ONE}: tensor '{GATE}\.weight': shape .* is absurd",
    ),
    "a negative size": (
        "plain",
        header(lambda h: h[f"{GATE}.weight"].update(shape=[-96, -64])),
        rf"{ONE}: tensor '{GATE}\.weight': shape must be .*non-negative",
    ),
    "two tensors in one place": (
        "plain",
        header(lambda h: h[LAST].update(data_offsets=h["mtp.norm.weight"]["data_offsets"])),
        rf"{ONE}: tensors '.*' and '.*' overlap",
    ),
    "past the end": (
        "plain",
        header(lambda h: h[f"{GATE}.weight"].update(data_offsets=[2**40, 2**40 + 96 * 64 * 2])),
        rf"{ONE}: tensor '{GATE}\.weight': needs .*truncated",
    ),
    "an unknown dtype": (
        "plain",
        header(lambda h: h[f"{GATE}.weight"].update(dtype="F3")),
        rf"{ONE}: tensor '{GATE}\.weight': unknown dtype 'F3'",
    ),
    "a Git LFS pointer": ("plain", put(ONE, LFS), rf"{ONE}: a Git LFS pointer.*git lfs pull"),
    "a folder named so": ("plain", instead(ONE, Path.mkdir), rf"{ONE}: |shards are missing: {ONE}"),
    "a link to itself": (
        "plain",
        instead(ONE, lambda p: p.symlink_to(p)),
        rf"{ONE}: |shards are missing: {ONE}",
    ),
    "a missing shard": (
        "shards",
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        "model-00002-of",
    ),
    "an index that names absent tensors": (
        "shards",
        forget("model.norm.weight"),
        r"the index promises 1 tensors their shards lack: 'model\.norm\.weight'",
    ),
    "an index that reaches outside": (
        "shards",
        put(artifacts.INDEX, b'{"weight_map": {"a": "../b.safetensors"}}'),
        r"index\.json: tensor 'a': '\.\./b\.safetensors' is not the name",
    ),
    "an index without a map": (
        "shards",
        put(artifacts.INDEX, b'{"weight_map": []}'),
        r"index\.json: needs a `weight",
    ),
}
CONFIGS: dict[str, Case] = {
    "no config": ("plain", lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "half a config": ("plain", cut("config.json", 0.5), r"config\.json: not valid JSON"),
    "more heads": (
        "plain",
        config(num_attention_heads=8),
        rf"{FIT}self_attn\.q_proj\.weight.*expected \[256, 64\]",
    ),
    "fewer heads of values": (
        "fp8",
        config(linear_num_value_heads=4),
        rf"{FIT}layers\.0\.linear_attn\.in_proj_qkv",
    ),
    "heads that do not divide": (
        "plain",
        config(num_key_value_heads=4),
        r"config\.json.*num_key_value_heads",
    ),
    "another vocabulary": (
        "plain",
        config(vocab_size=130),
        rf"{FIT}embed_tokens\.weight.*expected \[130, 64\]",
    ),
    "another vocabulary, packed": ("nvfp4", config(vocab_size=130), rf"{FIT}lm_head"),
    "no hidden size": ("plain", config(hidden_size=0), r"config\.json.*hidden_size must be"),
    "a layer too many": (
        "plain",
        config(num_hidden_layers=5, layer_types=["linear_attention"] * 3 + ["full_attention"] * 2),
        rf"{FIT}missing(?s:.*)layers\.4\.",
    ),
    "a layer too few": (
        "plain",
        config(num_hidden_layers=3, layer_types=["linear_attention"] * 3),
        rf"{FIT}unexpected(?s:.*)layers\.3\.",
    ),
    "half a generation config": (
        "plain",
        put("generation_config.json", b'{"top_k": '),
        r"generation_config\.json: not valid JSON",
    ),
    "half a quantisation config": (
        "nvfp4",
        cut("hf_quant_config.json", 0.5),
        r"hf_quant_config\.json: not valid JSON",
    ),
    "half a tokenizer": ("plain", put("tokenizer.json", b'{"model": '), r"tokenizer\.json"),
    "sizes whose product overflows": (
        "plain",
        config(num_attention_heads=2**24, num_key_value_heads=2**24, head_dim=2**24, hidden_size=2**24),
        "head_dim|num_attention_heads|does not fit",
    ),
    "experts without end": ("moe", config(num_experts=2**24), r"num_experts|mlp\.gate\.weight"),
    "experts without end, packed": ("mlx", config(num_experts=2**24), r"num_experts|mlp\.gate"),
    "experts too many": ("moe", config(num_experts=7), rf"{FIT}layers\.0\.mlp\.gate\.weight"),
}
TENSORS: dict[str, Case] = {
    "no rows": ("plain", tensor(f"{GATE}.weight", lambda t: t[:0]), rf"{FIT}gate_proj.*found \[0, 64\]"),
    "whole numbers": (
        "plain",
        tensor(f"{GATE}.weight", lambda t: t.int()),
        rf"{FIT}layers\.0\.mlp\.gate_proj.*I32",
    ),
    "a norm of whole numbers": (
        "plain",
        tensor(f"{TEXT}norm.weight", lambda t: t.int()),
        rf"{FIT}norm\.weight.*must be floats, found I32",
    ),
    "an unknown part": (
        "int4",
        extra(f"{GATE}.weight_rotation", torch.ones(4)),
        rf"{FIT}gate_proj\.weight_rotation",
    ),
    "fp8 without a scale": (
        "fp8",
        tensor(f"{GATE}.weight_scale_inv", gone, FIRST),
        rf"{FIT}gate_proj.*needs weight_scale",
    ),
    "fp8, a block too few": (
        "fp8",
        tensor(f"{GATE}.weight_scale_inv", fewer(0), FIRST),
        rf"{FIT}gate_proj.*weight_scale_inv has the shape \[1, 1\]",
    ),
    "fp8, the scales transposed": (
        "fp8",
        tensor(f"{GATE}.weight_scale_inv", lambda t: t.t(), FIRST),
        rf"{FIT}gate_proj.*weight_scale_inv has the shape \[1, 2\]",
    ),
    "fp8, scales of whole numbers": (
        "fp8",
        tensor(f"{GATE}.weight_scale_inv", lambda t: t.int(), FIRST),
        rf"{FIT}gate_proj.*weight_scale_inv is I32",
    ),
    "fp8, a NaN": (
        "fp8",
        tensor(f"{GATE}.weight_scale_inv", filled(NAN, 1), FIRST),
        r"layers\.0.*gate_proj.*not finite",
    ),
    "fp8, an infinity": (
        "fp8",
        tensor(f"{GATE}.weight_scale_inv", filled(INF), FIRST),
        r"gate_proj.*not finite",
    ),
    "fp8, bytes for codes": (
        "fp8",
        tensor(f"{GATE}.weight", lambda t: t.view(torch.uint8), FIRST),
        rf"{FIT}layers\.0\.mlp\.gate_proj.*U8",
    ),
    "fp8, two scales": (
        "fp8",
        extra(f"{GATE}.weight_scale", torch.ones(()), FIRST),
        rf"{FIT}gate_proj.*one scale.*here are weight_scale_inv and weight_scale",
    ),
    "nvfp4 without the second scale": (
        "nvfp4",
        tensor(f"{GATE}.weight_scale_2", gone),
        rf"{FIT}gate_proj.*weight_scale_2 is missing",
    ),
    "nvfp4, the second scale 0": (
        "nvfp4",
        tensor(f"{GATE}.weight_scale_2", torch.zeros_like),
        r"gate_proj.*is 0",
    ),
    "nvfp4, a NaN": (
        "nvfp4",
        tensor(f"{GATE}.weight_scale", filled(NAN, 7)),
        r"gate_proj.*weight_scale.*not finite",
    ),
    "nvfp4, an infinite second scale": (
        "nvfp4",
        tensor(f"{GATE}.weight_scale_2", filled(INF)),
        r"gate_proj.*weight_scale_2.*not finite",
    ),
    "nvfp4, scales of bfloat16": (
        "nvfp4",
        tensor(f"{GATE}.weight_scale", lambda t: t.bfloat16()),
        rf"{FIT}gate_proj.*weight_scale is BF16",
    ),
    "nvfp4, a group too few": (
        "nvfp4",
        tensor(f"{GATE}.weight_scale", fewer(1)),
        rf"{FIT}gate_proj.*3 groups",
    ),
    "nvfp4, the codes transposed": (
        "nvfp4",
        tensor(f"{GATE}.weight", lambda t: t.t()),
        rf"{FIT}gate_proj.*weight has the shape \[32, 96\]",
    ),
    "gptq, a group out of range": (
        "gptq",
        tensor(f"{DOWN}.g_idx", filled(3, 5), FIRST),
        r"down_proj.*g_idx runs from 0 to 3",
    ),
    "gptq, a group below 0": (
        "gptq",
        tensor(f"{DOWN}.g_idx", filled(-2, 5), FIRST),
        r"down_proj.*g_idx runs from -2",
    ),
    "gptq, an infinity": (
        "gptq",
        tensor(f"{DOWN}.scales", filled(INF), FIRST),
        r"down_proj.*scales.*not finite",
    ),
    "gptq, zeros too narrow": (
        "gptq",
        tensor(f"{DOWN}.qzeros", fewer(1), FIRST),
        rf"{FIT}down_proj.*qzeros has the shape",
    ),
    "gptq, codes of 64 bits": (
        "gptq",
        tensor(f"{DOWN}.qweight", lambda t: t.long(), FIRST),
        rf"{FIT}down_proj.*qweight is I64",
    ),
    "two formats at once": (
        "gptq",
        extra(f"{DOWN}.weight", torch.ones(64, 192).bfloat16(), FIRST),
        rf"{FIT}down_proj.*cannot be part of a bf16 weight",
    ),
    "int4, a shape that lies": (
        "int4",
        tensor(f"{GATE}.weight_shape", lambda t: t + 8),
        r"gate_proj.*weight_shape says \[104, 72\]",
    ),
    "int4 without a shape": (
        "int4",
        tensor(f"{GATE}.weight_shape", gone),
        rf"{FIT}gate_proj.*weight_shape is missing",
    ),
    "int4, a group too few": (
        "int4",
        tensor(f"{DOWN}.weight_scale", fewer(1)),
        r"down_proj.*(groups|weight_scale)",
    ),
    "int4, a NaN": (
        "int4",
        tensor(f"{GATE}.weight_scale", filled(NAN)),
        r"gate_proj.*weight_scale.*not finite",
    ),
    "int4, zeros of another shape": (
        "int4",
        extra(f"{GATE}.weight_zero_point", torch.zeros(5, 2, dtype=torch.int32)),
        rf"{FIT}gate_proj.*weight_zero_point has the shape \[5, 2\]",
    ),
    "awq, a NaN": ("awq", tensor(f"{DOWN}.scales", filled(NAN)), r"down_proj.*scales.*not finite"),
    "awq without zeros": ("awq", tensor(f"{DOWN}.qzeros", gone), rf"{FIT}down_proj.*qzeros is missing"),
    "mlx without biases": (
        "mlx",
        tensor("language_model.lm_head.biases", gone),
        rf"{FIT}lm_head.*biases are missing",
    ),
    "mlx, a NaN": (
        "mlx",
        tensor("language_model.lm_head.scales", filled(NAN)),
        r"lm_head.*scales.*not finite",
    ),
}


def other_head(**sizes: Any) -> Damage:
    """The sidecar of a model of another size."""

    def change(folder: Path) -> None:
        made = tiny.make(folder / "other", "dense", **sizes)
        head = {name: w for name, w in tiny.tensors(made).items() if name.startswith("mtp.")}
        save_file(head, folder / SIDECAR)

    return change


NOT_A_HEAD = {"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4), "other": torch.ones(2)}
HEADS: dict[str, Case] = {
    "a tensor of the head missing": ("plain", tensor("mtp.fc.weight", gone), r"1 missing.*mtp\.fc\.weight"),
    "fc transposed": (
        "plain",
        tensor("mtp.fc.weight", lambda t: t.t()),
        r"mtp\.fc\.weight.*found \[128, 64\]",
    ),
    "fc of whole numbers": ("plain", tensor("mtp.fc.weight", lambda t: t.int()), r"mtp\.fc.*I32"),
    "a head without a scale": (
        "fp8",
        tensor(f"{HEAD_GATE}.weight_scale_inv", gone, SIDECAR),
        rf"{HEAD_GATE}.*needs weight_scale",
    ),
    "a head's scale is NaN": (
        "fp8",
        tensor(f"{HEAD_GATE}.weight_scale_inv", filled(NAN), SIDECAR),
        rf"{HEAD_GATE}.*not finite",
    ),
    "half a second layer of a head": (
        "plain",
        extra("mtp.layers.1.norm.weight", torch.ones(64)),
        r"11 missing(?s:.*)mtp\.layers\.1\.",
    ),
    "a sidecar of another size": (
        "sidecar",
        other_head(hidden_size=48),
        r"mtp\.fc\.weight.*found \[48, 96\]",
    ),
    "a sidecar that is no head": (
        "sidecar",
        lambda f: save_file(NOT_A_HEAD, f / SIDECAR),
        r"mtp\.fc\.weight|no MTP head",
    ),
    "a sidecar cut": ("sidecar", cut(SIDECAR, 0.7), rf"{SIDECAR}: tensor '.*truncated"),
    "a sidecar cut in its header": ("sidecar", cut(SIDECAR, 20), rf"{SIDECAR}: the header claims"),
    "an empty sidecar": ("sidecar", cut(SIDECAR, 0), rf"{SIDECAR}: 0 bytes is too short"),
    "a sidecar that is a pointer": ("sidecar", put(SIDECAR, LFS), rf"{SIDECAR}: a Git LFS pointer"),
    "a sidecar that is a folder": ("sidecar", instead(SIDECAR, Path.mkdir), SIDECAR),
    "a sidecar that links to itself": ("sidecar", instead(SIDECAR, lambda p: p.symlink_to(p)), SIDECAR),
}


ALL = CONTAINERS | CONFIGS | TENSORS


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Good:
    return Good(tmp_path_factory)


@pytest.mark.parametrize("base", [base for base in damage.BASES if "gguf" not in base])
def test_the_undamaged_drafts(good, base):
    damage.assert_drafts(good(base))


@pytest.mark.parametrize("name", ALL)
def test_one_clear_error(good, name, tmp_path):
    damage.assert_one_clear_error(good.damaged(ALL[name], tmp_path), ALL[name][2])


@pytest.mark.parametrize("name", HEADS)
def test_a_damaged_head_is_told_and_done_without(good, name, tmp_path):
    damage.assert_served_plainly(good.damaged(HEADS[name], tmp_path), HEADS[name][2])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("file", [ONE, "config.json"])
def test_a_file_that_may_not_be_read(good, file, tmp_path):
    case: Case = (
        "plain",
        lambda folder: (folder / file).chmod(0),
        rf"{file}: cannot be read \(Permission denied\)",
    )
    damage.assert_one_clear_error(good.damaged(case, tmp_path), case[2])
