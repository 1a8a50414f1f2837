"""Heads as data: several layers, other joins; the same tokens whatever they draft, and what is told of a bad one."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.names import Naming
from headlong.cli.main import main
from headlong.config import EngineConfig
from headlong.convert.extract import extract
from headlong.convert.from_gguf import from_gguf
from headlong.convert.graft import graft
from headlong.convert.strip import strip
from headlong.convert.to_gguf import to_gguf
from headlong.engine.build import survey
from headlong.errors import HeadError
from headlong.models import registry
from headlong.models.head_spec import HeadSpec
from support import tiny
from support.steps import Driver, load
from support.tiny import random_tokens
from support.written import assert_same

SMALL = {"vocab_size": 6, "num_hidden_layers": 2, "layer_types": [tiny.LINEAR, tiny.FULL]}
"""Of few tokens, so that a random head is right now and then."""
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=[2, 3])
def several(request, tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("head"), head=request.param, seed=4, **SMALL)


def asked(depth, **own):
    """Greedy and sampled by turns; some prompts begin alike."""
    prompts = [random_tokens(6, 20, seed=0) + random_tokens(6, 1 + 9 * n, seed=n) for n in range(6)]
    params = [
        SamplingParams(
            max_tokens=18, temperature=0.9 * (n % 2), seed=n, logprobs=1, draft_tokens=depth, **own
        )
        for n in range(6)
    ]
    return prompts, params


def said(completions):
    return [(completion.token_ids, completion.logprobs) for completion in completions]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sizes",
    [
        {"cache_tokens": 2048},
        {"cache_tokens": 128, "max_rows": 6},  # rows are put back, and begin on pages that others left
        {"cache_tokens": 1024, "prefix_cache": False, "max_rows": 3, "chunk_tokens": 7},
    ],
    ids=["roomy", "cramped", "in pieces"],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_several_layers_change_no_token(several, device, dtype, sizes):
    llm = LLM(several.folder, device=device, dtype=dtype, mtp="on", page_size=16, max_context=128, **sizes)
    steps, step = [], llm.engine.step

    def noted():
        steps.append(step())
        return steps[-1]

    llm.engine.step = noted
    prompts, params = asked(0)
    wanted = [said([llm.generate(prompt, own)])[0] for prompt, own in zip(prompts, params, strict=True)]
    accepted = 0
    for depth in (1, 2, 3, 5):
        found = llm.generate(*asked(depth))
        assert said(found) == wanted
        accepted += sum(completion.stats.accepted for completion in found)
        llm.engine.state.check_integrity()
    assert accepted
    assert any(step.preempted for step in steps) == ("max_rows" in sizes and "chunk_tokens" not in sizes)


def test_rows_that_pause_go_on_with_all_layers(several):
    """Pairs that waited leave in every layer what they would have left at once."""
    built, script = load(several.folder, "float64"), random_tokens(6, 60, seed=3)
    at_once, later = Driver(built), Driver(built)
    for driver in (at_once, later):
        driver.open("a", script)
        driver.feed("a", [30])
    at_once.decode("a", 9)
    for _ in range(9):
        later.decode("a", 1)
    assert at_once.propose("a", 5) == later.propose("a", 5)
    for name, state in at_once.state.layers.items():
        if name.startswith("mtp."):
            pages = torch.tensor(at_once.state.rows["a"].pages)
            assert torch.isfinite(state.keys[pages]).all() and state.keys[pages].any()


def test_each_depth_is_its_layer(tmp_path):
    """With one layer's block silenced, only its drafts change."""
    made = tiny.make(tmp_path / "whole", head=2, seed=6)
    weights = tiny.tensors(made)
    weights["mtp.layers.1.mlp.down_proj.weight"].mul_(-3.0)
    tiny.write(tmp_path / "other", tiny.read_config(made.folder), weights)
    drafts = []
    for folder in ("whole", "other"):
        firsts, seconds = [], []
        for seed in range(8):
            driver = Driver(load(tmp_path / folder, "float64"))
            driver.open("a", random_tokens(made.vocab_size, 20, seed=seed))
            driver.feed("a", [15])
            first, second = driver.propose("a", 2)
            firsts.append(first)
            seconds.append(second)
        drafts.append((firsts, seconds))
    assert drafts[0][0] == drafts[1][0] and drafts[0][1] != drafts[1][1]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_a_layer_lacks_is_listed(tmp_path, number):
    made = tiny.make(tmp_path / "made", head=3)
    lacking = [f"mtp.layers.{number}.self_attn.k_proj.weight", f"mtp.layers.{number}.mlp.up_proj.weight"]
    weights = {name: w for name, w in tiny.tensors(made).items() if name not in lacking}
    tiny.write(tmp_path / "lacking", tiny.read_config(made.folder), weights)
    with pytest.raises(HeadError) as caught:
        LLM(tmp_path / "lacking", device="cpu", mtp="on")
    assert "2 missing tensors" in str(caught.value) and all(name in str(caught.value) for name in lacking)
    assert "2 missing tensors" in str(LLM(tmp_path / "lacking", device="cpu").mtp_refusal)


def test_a_whole_layer_that_is_missing_is_listed(tmp_path):
    made = tiny.make(tmp_path / "made", head=3)
    weights = {name: w for name, w in tiny.tensors(made).items() if not name.startswith("mtp.layers.1.")}
    tiny.write(tmp_path / "lacking", tiny.read_config(made.folder), weights)
    with pytest.raises(HeadError, match=r"missing[\s\S]*mtp\.layers\.1\.self_attn\.q_proj\.weight"):
        LLM(tmp_path / "lacking", device="cpu", mtp="on")


def test_layers_that_nobody_has(tmp_path):
    made = tiny.make(tmp_path / "made", head=1)
    weights = {
        name.replace("mtp.layers.0.", "mtp.layers.1000000000."): w for name, w in tiny.tensors(made).items()
    }
    tiny.write(tmp_path / "made", tiny.read_config(made.folder), weights)
    refusal = survey(Checkpoint.open(made.folder)).head_refusal
    assert refusal is not None and "number 1000000001 layers, above 16" in refusal


def test_inspect_shows_all_layers(several, capsys):
    count = len(several.head.layers)
    assert main(["inspect", str(several.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["head"]["usable"]
    names = [module["name"] for module in found["modules"] if module["name"].startswith("mtp.layers.")]
    assert any(name.startswith(f"mtp.layers.0-{count - 1}.") for name in names)


def tiny_tensors(folder):
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(info.name) for name, info in registry.names_of(checkpoint).sources.items()}


def test_several_layers_through_gguf_and_back(several, tmp_path):
    """Each layer is a block of its own; stripped, extracted and grafted, the model is the same."""
    count, model = len(several.head.layers), Checkpoint.open(several.folder)
    to_gguf(model, tmp_path / "model.gguf", type="f32")
    whole = Checkpoint.open(tmp_path / "model.gguf")
    assert whole.metadata["qwen35.nextn_predict_layers"] == count
    assert survey(whole, EngineConfig(mtp="on")).names.head_layers == count
    from_gguf(whole, tmp_path / "back", type="f32")
    back, original = tiny_tensors(tmp_path / "back"), tiny_tensors(several.folder)
    assert back.keys() == original.keys()
    for name, weight in original.items():  # norms were stored with 1 added
        torch.testing.assert_close(back[name], weight, rtol=0.0, atol=1e-6)
    assert tiny.read_config(tmp_path / "back")["mtp_num_hidden_layers"] == count
    for suffix, source in ((".gguf", whole), ("", model)):
        head = tmp_path / f"mtp{suffix or '.safetensors'}"
        bare = tmp_path / f"bare{suffix}"
        extract(source, head)
        strip(source, bare)
        assert survey(Checkpoint.open(bare), EngineConfig(mtp="auto")).head_refusal
        graft(bare, head, tmp_path / f"again{suffix}")
        assert_same(tmp_path / f"again{suffix}", source.folder)
        head.unlink()


class _Joined(nn.Module):
    """What a head makes of a pair, by its definition, put in place of a reference head's `fc`."""

    def __init__(self, spec: HeadSpec, fc: nn.Linear) -> None:
        super().__init__()
        self.spec, self.fc = spec, fc

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        embedding, hidden = pair.chunk(2, dim=-1)
        first, second = self.fc.weight.chunk(2, dim=1)
        if self.spec.join == "concat" and self.spec.order == "hidden_first":
            embedding, hidden = hidden, embedding
        return embedding @ first.T + hidden @ second.T


JOINS = {
    "hidden first": HeadSpec(order="hidden_first"),
    "sum": HeadSpec(join="sum"),
    "a join in each layer": HeadSpec(joins_in_layers=True),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", JOINS)
def test_other_joins(tmp_path, monkeypatch, name, dtype):
    """Against transformers' layer behind a join by its definition; the same tokens with drafts and without."""
    spec = JOINS[name]
    family = replace(registry.FAMILIES["qwen3"], mtp=spec)
    monkeypatch.setitem(registry.FAMILIES, "qwen3", family)
    made = tiny.make(tmp_path / "made", "qwen3", head=2, seed=9, vocab_size=11)
    weights = tiny.tensors(made)
    if spec.join == "sum":
        first, second = weights.pop("mtp.fc.weight").chunk(2, dim=1)
        weights |= {"mtp.fc_embedding.weight": first.clone(), "mtp.fc_hidden.weight": second.clone()}
    if spec.joins_in_layers:
        for module in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            shared = weights.pop(f"mtp.{module}.weight")
            weights |= {f"mtp.layers.{k}.{module}.weight": shared.clone() for k in range(2)}
    tiny.write(tmp_path / "made", tiny.read_config(made.folder), weights)
    made.head.fc = _Joined(spec, made.head.fc)
    oracle = made.double() if dtype == "float64" else made
    script = random_tokens(11, 40, seed=2)
    driver = Driver(load(made.folder, dtype))
    driver.open("a", script)
    driver.feed("a", [25])
    carry = oracle.pairs(script[1:26], oracle.forward(script[:25])[0])[-1]
    held = driver.state.carry_SD[driver.state.rows["a"].slot]
    torch.testing.assert_close(held, carry, atol=1e-4, rtol=0.0)
    llm = LLM(made.folder, device="cpu", dtype=dtype, mtp="on", cache_tokens=2048, max_context=128)
    wanted = said(llm.generate(*asked(0)))
    assert said(llm.generate(*asked(3))) == wanted


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (HeadSpec(tap="streams"), "several residual streams"),
        (HeadSpec(tap="pre_norm"), "before the final norm"),
        (HeadSpec(recycle="pre_norm"), "before the final norm"),
        (HeadSpec(chained=False), "further drafts read the target's hidden state"),
        (HeadSpec(kv="target"), "attends to the target's keys and values"),
        (HeadSpec(shares=("embedding",)), "lm_head of its own"),
    ],
)
def test_a_head_that_cannot_be_computed_is_refused(tmp_path, monkeypatch, spec, why):
    made = tiny.make(tmp_path, "qwen3")
    monkeypatch.setitem(registry.FAMILIES, "qwen3", replace(registry.FAMILIES["qwen3"], mtp=spec))
    with pytest.raises(HeadError, match=rf"the MTP head of qwen3 cannot be used: .*{why}"):
        LLM(made.folder, device="cpu", mtp="on")
    assert why in str(LLM(made.folder, device="cpu").mtp_refusal)


NAMES = {
    "under a stack of its own": (
        Naming("mtp_layers.{k}.", {"input_proj": "fc", "token_layernorm": "e"}),
        "model.mtp_layers.1.",
    ),
    "after the layers": (
        Naming("layers.{block}.", {"input_proj": "fc", "token_layernorm": "e"}),
        "model.layers.4.",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_of_heads(case):
    """Both ways; what is no head's is left alone."""
    naming, prefix = NAMES[case]
    pairs = {
        "input_proj.weight": "mtp.layers.1.fc.weight",
        "token_layernorm.weight": "mtp.layers.1.e.weight",
        "self_attn.q_proj.weight_scale_inv": "mtp.layers.1.self_attn.q_proj.weight_scale_inv",
    }
    for disk, name in pairs.items():
        assert naming.canonical(f"{prefix}{disk}".removeprefix("model."), 3) == name
        assert naming.disk(name, 3) == prefix + disk
    assert naming.canonical("layers.2.mlp.up_proj.weight", 3) == "layers.2.mlp.up_proj.weight"
    assert naming.disk("norm.weight", 3) == "norm.weight"
