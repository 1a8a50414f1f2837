"""From a folder to a model that serves: every layout of names, and what can be wrong with a folder."""

import re

import pytest
import torch
from safetensors.torch import save_file

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.config import EngineConfig
from headlong.engine.build import survey
from headlong.errors import CheckpointError, HeadError, RequestError
from support import tiny
from support.steps import Driver, load
from support.tiny import random_tokens

SCRIPT = random_tokens(64, 20, seed=0)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("dense"), "dense", vocab_size=64)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("moe"), "moe", vocab_size=64)


def outputs(folder):
    """Logits of a script, the head's carry and its drafts."""
    driver = Driver(load(folder))
    driver.open("a", SCRIPT)
    logits = driver.feed("a", [len(SCRIPT) - 1]).logits
    return logits, driver.state.carry_SD[driver.state.rows["a"].slot], driver.propose("a", 4)


def assert_same_outputs(folder, expected):
    for found, wanted in zip(outputs(folder), expected, strict=True):
        assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else found == wanted


def renamed(weights, text="model.", mtp="mtp.", lm_head="lm_head."):
    """`weights` by their usual names, under other prefixes."""
    rules = (("model.", text), ("mtp.", mtp), ("lm_head.", lm_head))
    found = {}
    for name, weight in weights.items():
        old, new = next((old, new) for old, new in rules if name.startswith(old))
        found[new + name.removeprefix(old)] = weight
    return found


LAYOUTS = {
    "model.": {},
    "model.language_model.": {"text": "model.language_model."},
    "model.language_model. throughout": {
        "text": "model.language_model.",
        "mtp": "model.language_model.mtp.",
        "lm_head": "model.language_model.lm_head.",
    },
    "language_model.model.": {"text": "language_model.model.", "lm_head": "language_model.lm_head."},
    "language_model. throughout": {
        "text": "language_model.model.",
        "mtp": "language_model.mtp.",
        "lm_head": "language_model.lm_head.",
    },
    "model.mtp.": {"mtp": "model.mtp."},
    "no prefix": {"text": ""},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["dense", "moe"])
def test_every_prefix_loads_the_same(layout, family, request, tmp_path):
    made = request.getfixturevalue(family)
    vision = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(4, 4)}
    tiny.write(tmp_path, tiny.read_config(made.folder), renamed(tiny.tensors(made), **layout) | vision)
    assert_same_outputs(tmp_path, outputs(made.folder))


@pytest.mark.parametrize("prefix", ["mtp.", "", "model.mtp."])
def test_a_sidecar_loads_the_same(dense, tmp_path, prefix):
    weights = tiny.tensors(dense)
    head = {name: weight for name, weight in weights.items() if name.startswith("mtp.")}
    target = {name: weight for name, weight in weights.items() if name not in head}
    tiny.write(tmp_path, tiny.read_config(dense.folder), target)
    save_file(
        {prefix + name.removeprefix("mtp."): w for name, w in head.items()}, tmp_path / "mtp.safetensors"
    )
    assert_same_outputs(tmp_path, outputs(dense.folder))


def test_a_sidecar_beside_shards_loads_the_same(dense, tmp_path):
    weights = tiny.tensors(dense)
    head = {name: weight for name, weight in weights.items() if name.startswith("mtp.")}
    target = {name: weight for name, weight in weights.items() if name not in head}
    tiny.write_sharded(tmp_path, tiny.read_config(dense.folder), target)
    save_file(head, tmp_path / "mtp.safetensors")
    assert_same_outputs(tmp_path, outputs(dense.folder))


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_shards_load_the_same(family, request, tmp_path):
    made = request.getfixturevalue(family)
    tiny.write_sharded(tmp_path, tiny.read_config(made.folder), tiny.tensors(made))
    assert_same_outputs(tmp_path, outputs(made.folder))


def test_experts_apart_load_the_same(moe, tmp_path):
    weights = tiny.tensors(moe, "apart")
    assert "mtp.layers.0.mlp.experts.5.down_proj.weight" in weights
    tiny.write_sharded(tmp_path, tiny.read_config(moe.folder), weights, num_shards=4)
    assert_same_outputs(tmp_path, outputs(moe.folder))


@pytest.mark.parametrize("family", ["dense", "moe", "next"])
def test_what_transformers_saves_loads(family, tmp_path):
    """`save_pretrained` with names and shards as transformers chooses them; it knows nothing of the head."""
    made = tiny.make(tmp_path / "made", family, vocab_size=64)
    made.model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    driver, own = Driver(load(tmp_path / "saved")), Driver(load(made.folder, mtp="off"))
    for d in (driver, own):
        d.open("a", SCRIPT)
    assert torch.equal(driver.feed("a", [19]).logits, own.feed("a", [19]).logits)


def test_a_stored_lm_head_wins_over_a_tied_config(dense, tmp_path):
    config = tiny.read_config(dense.folder) | {"tie_word_embeddings": True}
    tiny.write(tmp_path, config, tiny.tensors(dense))
    assert_same_outputs(tmp_path, outputs(dense.folder))


def test_a_tied_model_multiplies_by_its_embedding(dense, tmp_path):
    """The wrapper's word on tying counts over the text config's, which often repeats a default."""
    weights = tiny.tensors(dense)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    tiny.write(tmp_path / "stored", tiny.read_config(dense.folder), weights)
    del weights["lm_head.weight"]
    text = tiny.read_config(dense.folder)
    wrapper = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    tiny.write(tmp_path / "tied", wrapper, weights)
    assert_same_outputs(tmp_path / "tied", outputs(tmp_path / "stored"))


def test_half_precision_on_disk(dense, tmp_path):
    """Stored in bfloat16 and served in float32, a model is that of the rounded weights."""
    weights = tiny.tensors(dense)
    tiny.write(
        tmp_path / "half", tiny.read_config(dense.folder), {name: w.bfloat16() for name, w in weights.items()}
    )
    tiny.write(
        tmp_path / "rounded",
        tiny.read_config(dense.folder),
        {name: w.bfloat16().float() for name, w in weights.items()},
    )
    assert_same_outputs(tmp_path / "half", outputs(tmp_path / "rounded"))


class TestHead:
    """A head that is missing or does not fit."""

    def without(self, made, tmp_path, pattern="mtp.*", **extra):
        weights = {k: w for k, w in tiny.tensors(made).items() if not re.fullmatch(pattern, k)}
        tiny.write(tmp_path, tiny.read_config(made.folder), weights | extra)
        return tmp_path

    def test_auto_serves_without_it_and_says_why(self, dense, tmp_path):
        llm = LLM(self.without(dense, tmp_path), device="cpu")
        assert "no MTP head" in llm.mtp_refusal
        completion = llm.generate(SCRIPT, SamplingParams(max_tokens=5))
        assert len(completion.token_ids) == 5
        assert not completion.stats.mtp
        assert completion.stats.mtp.reason == llm.mtp_refusal
        own = LLM(dense.folder, device="cpu")
        assert own.mtp_refusal is None
        drafted = own.generate(SCRIPT, SamplingParams(max_tokens=5))
        assert drafted.token_ids == completion.token_ids and drafted.stats.mtp

    def test_on_refuses_in_a_sentence(self, dense, tmp_path):
        with pytest.raises(
            HeadError, match=r"mtp='on', but the checkpoint has no MTP head .*; use mtp='auto'"
        ):
            LLM(self.without(dense, tmp_path), mtp="on", device="cpu")

    def test_off_ignores_whatever_is_there(self, dense, tmp_path):
        folder = self.without(dense, tmp_path, r"mtp\.fc\.weight")
        llm = LLM(folder, mtp="off", device="cpu")
        assert "mtp='off'" in llm.mtp_refusal

    def test_a_further_layer_must_be_whole(self, dense, tmp_path):
        folder = self.without(dense, tmp_path, "", **{"mtp.layers.1.input_layernorm.weight": torch.ones(48)})
        assert "missing tensors" in LLM(folder, device="cpu").mtp_refusal
        with pytest.raises(
            HeadError, match=r"missing[\s\S]*mtp\.layers\.1\.post_attention_layernorm\.weight"
        ):
            LLM(folder, mtp="on", device="cpu")

    def assert_refused(self, folder, pattern):
        """`on` lists every fault; `auto` serves plainly and says the first of them in one sentence."""
        with pytest.raises(HeadError, match=pattern):
            survey(Checkpoint.open(folder), EngineConfig(mtp="on"))
        refusal = survey(Checkpoint.open(folder)).head_refusal
        assert re.search(pattern, refusal) and "\n" not in refusal

    @pytest.mark.parametrize(
        "name",
        [
            "mtp.fc.weight",
            "mtp.norm.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.layers.0.self_attn.q_norm.weight",
            "mtp.layers.0.mlp.experts.gate_up_proj",
        ],
    )
    def test_a_missing_tensor(self, request, tmp_path, name):
        made = request.getfixturevalue("moe" if "experts" in name else "dense")
        folder = self.without(made, tmp_path, re.escape(name))
        self.assert_refused(folder, rf"MTP head does not fit.*1 missing(?s:.*){re.escape(name)} \[")

    def test_an_extra_tensor(self, dense, tmp_path):
        folder = self.without(dense, tmp_path, "", **{"mtp.layers.0.mlp.gate.weight": torch.ones(6, 48)})
        self.assert_refused(folder, r"1 unexpected(?s:.*)mtp\.layers\.0\.mlp\.gate\.weight .*\[6, 48\]")

    def test_a_misshapen_tensor(self, dense, tmp_path):
        folder = self.without(dense, tmp_path, "", **{"mtp.fc.weight": torch.ones(48, 48)})
        self.assert_refused(folder, r"mtp\.fc\.weight .*: expected \[48, 96\], found \[48, 48\]")
        llm = LLM(folder, device="cpu")
        assert "expected [48, 96]" in llm.mtp_refusal
        assert len(llm.generate(SCRIPT, SamplingParams(max_tokens=5)).token_ids) == 5

    def test_one_expert_short(self, moe, tmp_path):
        weights = tiny.tensors(moe, "apart")
        del weights["mtp.layers.0.mlp.experts.3.up_proj.weight"]
        tiny.write(tmp_path, tiny.read_config(moe.folder), weights)
        self.assert_refused(tmp_path, r"1 missing(?s:.*)mtp\.layers\.0\.mlp\.experts\.3\.up_proj\.weight")

    def test_a_sentence_has_an_end(self, dense, tmp_path):
        folder = self.without(dense, tmp_path, r"mtp\.layers\.0\.mlp.*|mtp\.fc.*|mtp\.norm.*")
        refusal = survey(Checkpoint.open(folder)).head_refusal
        assert "5 missing" in refusal and refusal.endswith("; and 2 more, which mtp='on' lists")


def test_all_faults_of_a_target_in_one_error(dense, tmp_path):
    weights = tiny.tensors(dense)
    del weights["model.norm.weight"], weights["model.layers.0.linear_attn.A_log"]
    weights["model.layers.9.mlp.up_proj.weight"] = torch.ones(2, 3)
    weights["stray"] = torch.ones(1)
    weights["model.layers.1.self_attn.o_proj.weight"] = torch.ones(48, 63)
    weights["model.embed_tokens.weight"] = torch.ones(63, 48)
    tiny.write(tmp_path, tiny.read_config(dense.folder), weights)
    with pytest.raises(CheckpointError) as caught:
        LLM(tmp_path, device="cpu")
    assert not isinstance(caught.value, HeadError)
    message = str(caught.value)
    assert "2 missing, 2 unexpected, 2 mis-shaped" in message
    for line in (
        "missing: norm.weight [48]",
        "missing: layers.0.linear_attn.A_log [4]",
        "unexpected: layers.9.mlp.up_proj.weight (on disk model.layers.9.mlp.up_proj.weight) [2, 3]",
        "unexpected: stray (on disk stray) [1]",
        "mis-shaped: layers.1.self_attn.o_proj.weight (on disk model.layers.1.self_attn.o_proj.weight): "
        "expected [48, 64], found [48, 63]",
        "mis-shaped: embed_tokens.weight (on disk model.embed_tokens.weight): expected [64, 48], found [63, 48]",
    ):
        assert f"\n  {line}" in message


def test_an_untied_model_needs_its_lm_head(dense, tmp_path):
    weights = tiny.tensors(dense)
    del weights["lm_head.weight"]
    tiny.write(tmp_path, tiny.read_config(dense.folder), weights)
    with pytest.raises(CheckpointError, match=r"1 missing(?s:.*)lm_head\.weight \[64, 48\]"):
        LLM(tmp_path, device="cpu")


def test_without_a_tokenizer_token_ids_are_served_and_text_is_refused(dense):
    llm = LLM(dense.folder, device="cpu")
    completion = llm.generate(SCRIPT, SamplingParams(max_tokens=4))
    assert len(completion.token_ids) == 4 and completion.text == ""
    with pytest.raises(RequestError, match=r"prompt is text, but .* has no tokenizer\.json; pass token ids"):
        llm.generate("Once upon a time")
    with pytest.raises(RequestError, match=r"messages need a chat template, but .* has no tokenizer\.json"):
        llm.chat([{"role": "user", "content": "Hello"}])
