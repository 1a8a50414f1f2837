"""A head that is the layer after the last: its names, its copies, its ways of being packed, its file; odd configs."""

import logging
from typing import Any

import pytest
import torch
from test_head_spec import tiny_tensors
from test_packed_models import assert_drafts_change_nothing, logits_of
from transformers.modeling_layers import MtpModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM

from headlong import LLM
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.config import EngineConfig
from headlong.convert.extract import extract
from headlong.convert.from_gguf import from_gguf
from headlong.convert.graft import graft
from headlong.convert.strip import strip
from headlong.convert.to_gguf import to_gguf
from headlong.engine.build import survey
from headlong.errors import ConfigError
from headlong.models import registry
from headlong.quant.plain import PlainFormat
from support import tiny
from support.packing import pack, unpacked
from support.steps import Driver, load
from support.tiny import random_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
}
HEAD = "model.layers.2."
COPIES = [f"{HEAD}embed_tokens.weight", f"{HEAD}shared_head.head.weight"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("glm"), "glm4_moe", experts="apart", seed=2, **SIZES)


@torch.no_grad()
def test_transformers_reads_the_same_head(made):
    """From the folder, by its own names; of models with another number of layers it must be told which is the head."""
    model = Glm4MoeForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]
    theirs = MtpModel.from_pretrained(model).layers[0].state_dict()
    for name, weight in made.head.mtp.layers[0].state_dict().items():
        torch.testing.assert_close(theirs[name], weight, rtol=0.0, atol=0.0)


def test_copies_are_not_loaded_and_told_where_they_differ(made, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    names = survey(Checkpoint.open(made.folder), EngineConfig(mtp="on")).names
    assert sorted(name for names in names.skipped.values() for name in names) == COPIES
    assert not any("embed_tokens" in name or "lm_head" in name for name in names.sources if "mtp." in name)
    load(made.folder)
    assert not caplog.records
    weights = tiny.tensors(made, "apart")
    weights[COPIES[0]][-1, -1] += 1.0
    weights[COPIES[1]] = weights[COPIES[1]].bfloat16()
    tiny.write(tmp_path / "other", tiny.read_config(made.folder), weights)
    assert_drafts_change_nothing(tmp_path / "other")
    assert f"{COPIES[0]} differs from the target's embed_tokens.weight" in caplog.text
    assert f"{COPIES[1]} is stored otherwise than the target's lm_head.weight" in caplog.text
    for name in COPIES:
        del weights[name]
    tiny.write(tmp_path / "without", tiny.read_config(made.folder), weights)
    assert LLM(tmp_path / "without", device="cpu", mtp="on").mtp_refusal is None


KINDS = [
    ("fp8_channel", "fp8_channel"),
    ("fp8_block", None),
    ("nvfp4_modelopt", None),
    ("nvfp4_compressed", "fp8_block"),
    ("int4_g32", None),
    ("awq", "awq"),
]


@pytest.mark.parametrize(("how", "head"), KINDS, ids=str)
def test_packed_like_releases(made, tmp_path, how, head):
    """Attention, experts and shared experts; the head alike, another way or in bfloat16."""
    stored, meant = {}, {}
    for name, weight in tiny.tensors(made, "apart").items():
        kind = head if name.startswith(HEAD) else how
        if kind is None or weight.dim() != 2 or not name.endswith("_proj.weight"):
            stored[name] = weight.bfloat16()
            meant[name] = stored[name].float()
            continue
        parts = pack(weight, kind)
        stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
        meant[name] = unpacked(kind, parts, tuple(weight.shape))
    config = tiny.read_config(made.folder)
    for folder, tensors in (("packed", stored), ("floats", meant)):
        tiny.write(tmp_path / folder, config, {name: w.contiguous() for name, w in tensors.items()})
    formats = survey(Checkpoint.open(tmp_path / "packed"), EngineConfig(mtp="on")).formats
    for name in ("layers.1.mlp.experts.3.up_proj.weight", "layers.1.mlp.shared_expert.down_proj.weight"):
        assert not isinstance(formats[name], PlainFormat)
        assert isinstance(formats[f"mtp.{name.replace('.1.', '.0.', 1)}"], PlainFormat) == (head is None)
    torch.testing.assert_close(
        logits_of(tmp_path / "packed"), logits_of(tmp_path / "floats"), rtol=1e-4, atol=1e-4
    )
    assert_drafts_change_nothing(tmp_path / "packed")


def carry_of(folder):
    driver = Driver(load(folder))
    driver.open("a", random_tokens(96, 20, seed=1))
    driver.feed("a", [19])
    return driver.state.carry_SD[driver.state.rows["a"].slot]


def test_the_head_through_gguf_and_back(made, tmp_path):
    """And alone, stripped and grafted, in either container."""
    model, wanted = Checkpoint.open(made.folder), carry_of(made.folder)
    to_gguf(model, tmp_path / "model.gguf", type="f32")
    whole = Checkpoint.open(tmp_path / "model.gguf")
    assert whole.metadata["glm4moe.nextn_predict_layers"] == 1
    assert whole.metadata["glm4moe.expert_gating_func"] == 2
    from_gguf(whole, tmp_path / "back", type="f32")
    assert tiny.read_config(tmp_path / "back")["num_nextn_predict_layers"] == 1
    assert "mtp_num_hidden_layers" not in tiny.read_config(tmp_path / "back")
    for path in ("model.gguf", "back"):
        torch.testing.assert_close(carry_of(tmp_path / path), wanted, rtol=0.0, atol=1e-5)
    written = tiny_tensors(tmp_path / "back")
    assert {name for name in written if name.startswith("mtp.layers.0.mlp.experts.")} == {
        "mtp.layers.0.mlp.experts.gate_up_proj",
        "mtp.layers.0.mlp.experts.down_proj",
    }
    for suffix, source in ((".gguf", whole), ("", model)):
        head, bare = tmp_path / f"mtp{suffix or '.safetensors'}", tmp_path / f"bare{suffix}"
        extract(source, head)
        strip(source, bare)
        left = Checkpoint.open(bare)
        assert survey(left, EngineConfig(mtp="auto")).head_refusal
        assert not any("layers.2." in name or "blk.2." in name for name in left.tensors)
        graft(bare, head, tmp_path / f"again{suffix}")
        torch.testing.assert_close(carry_of(tmp_path / f"again{suffix}"), wanted, rtol=0.0, atol=1e-5)
        head.unlink()
    extract(whole, tmp_path / "mtp.safetensors")  # unpacked, for a model in the other container
    graft(tmp_path / "bare", tmp_path / "mtp.safetensors", tmp_path / "across")
    torch.testing.assert_close(carry_of(tmp_path / "across"), wanted, rtol=0.0, atol=0.05)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n_group": 3}, r"n_group \(3\) must divide n_routed_experts \(8\)"),
        ({"n_group": 8, "topk_group": 4}, "groups of at least two"),
        ({"n_group": 2, "topk_group": 3}, r"topk_group \(3\)"),
        ({"n_group": 4, "topk_group": 1}, r"num_experts_per_tok \(3\) is above the 2 experts"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is above n_routed_experts \(8\)"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh' is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor must be above 0"),
        ({"n_shared_experts": -1}, "n_shared_experts must be a whole number"),
    ],
)
def test_routing_that_cannot_be(made, changes, why):
    with pytest.raises(ConfigError, match=why):
        registry.read_config(tiny.read_config(made.folder) | changes)
