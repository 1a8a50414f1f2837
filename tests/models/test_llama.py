"""What is Llama's alone: rotary scaling, stored factors, its config; and the same tokens whatever is drafted."""

import copy
import math

import pytest
import torch

from headlong import LLM, SamplingParams
from headlong.errors import CheckpointError, ConfigError, HeadError
from headlong.models import registry
from headlong.ops.rope.scaling import Llama3Scaling
from support import tiny, tiny_llama
from support.steps import Driver, load
from support.tiny import random_tokens

LENGTH = 41
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Of eight frequencies some are left alone, some stretched, and some lie between."""


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0.0)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float64"])
def llm(request, tmp_path_factory):
    """Of few tokens, so that a random head is right now and then."""
    changes = {"vocab_size": 6, "attention_bias": True, "rope": LLAMA3, "head_dim": 16}
    small = tiny_llama.make(tmp_path_factory.mktemp("llama"), seed=8, **changes)
    return LLM(small.folder, device="cpu", dtype=request.param, mtp="on", cache_tokens=4096, max_context=256)


def asked(depths):
    """Ten rows, greedy and sampled by turns, drafting `depths` in turn."""
    prompts = [random_tokens(6, 1 + 7 * number % 40, seed=number) for number in range(10)]
    params = [
        SamplingParams(
            max_tokens=20,
            temperature=0.9 * (number % 2),
            seed=number,
            logprobs=2,
            draft_tokens=depths[number % len(depths)],
        )
        for number in range(10)
    ]
    return prompts, params


@pytest.mark.parametrize(
    "depths",
    [
        (1,),
        pytest.param((2,), marks=pytest.mark.slow),
        (3,),
        pytest.param((4,), marks=pytest.mark.slow),
        (0, 3, 1, 4, 2),
    ],
    ids=str,
)
def test_drafting_and_company_change_no_token(llm, depths):
    prompts, params = asked((0,))
    alone = [llm.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    together = llm.generate(*asked(depths))
    for found, wanted in zip(together, alone, strict=True):
        assert found.token_ids == wanted.token_ids
        assert found.logprobs == wanted.logprobs
    accepted = sum(found.stats.accepted for found in together)
    assert 0 < accepted < sum(found.stats.drafted for found in together)


def test_llama3_factors_cover_all_three_kinds():
    """Or the case above would not test them; the middle ones by the definition, one by one."""
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    factors = scaling.factors(10000.0, 16).tolist()
    assert factors[0] == 1.0 and factors[-1] == 8.0 and any(1.0 < factor < 8.0 for factor in factors)
    for place, factor in enumerate(factors):
        frequency = 10000.0 ** (-place / 8)
        turns = 64 * frequency / (2 * math.pi)
        if 1.0 < turns < 4.0:
            smooth = (turns - 1.0) / 3.0
            assert frequency / factor == pytest.approx((1 - smooth) * frequency / 8.0 + smooth * frequency)


def test_stored_factors_win_over_a_scaling_in_the_config(tmp_path):
    """They say the same, so that dividing twice would be wrong."""
    factors = Llama3Scaling(8.0, 1.0, 4.0, 64).factors(10000.0, 16).float()
    sizes = {"rope": LLAMA3, "head_dim": 16, "seed": 1, "head": False}
    computed, stored = (tiny_llama.make(tmp_path / name, **sizes) for name in ("computed", "stored"))
    weights = tiny.tensors(stored) | {"rope_freqs.weight": factors}
    tiny.write(stored.folder, tiny.read_config(stored.folder), weights)
    frequencies = [load(m.folder).model.rotary.inv_freq for m in (computed, stored)]
    torch.testing.assert_close(frequencies[0], frequencies[1], rtol=1e-6, atol=0.0)
    assert_close(frequencies[0], computed.text.rotary_emb.inv_freq)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_stored_factors_that_cannot_be(tmp_path, bad):
    factors = torch.ones(6)
    factors[2] = bad
    made = tiny_llama.make(tmp_path, rope_factors=factors, head=False)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*positive"):
        load(made.folder)


def test_stored_factors_of_the_wrong_length(tmp_path):
    made = tiny_llama.make(tmp_path, head=False)
    weights = tiny.tensors(made) | {"rope_freqs.weight": torch.ones(5)}
    tiny.write(tmp_path, tiny.read_config(tmp_path), weights)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        load(made.folder)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
}
"""For 8 frequencies."""


@pytest.mark.parametrize(("longest", "length"), [(512, LENGTH), (16, 15)])
def test_longrope_has_one_set_of_factors(tmp_path, longest, length):
    """The long ones, where the model's context is longer than the first one: those of transformers for such prompts."""
    made = tiny_llama.make(tmp_path, rope=LONGROPE, head_dim=16, max_position_embeddings=longest, head=False)
    script = random_tokens(made.vocab_size, length + 1, seed=1)
    driver = Driver(load(made.folder))
    driver.open("a", script)
    assert_close(driver.feed("a", [4, length - 4]).logits, made.forward(script[:length])[1])


@pytest.mark.parametrize("listed", [None, [1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + ["2"], 3.0])
def test_longrope_factors_that_cannot_be(plain, listed):
    with pytest.raises(ConfigError, match=r"long_factor must list \d+ positive numbers"):
        parse(plain, rope_parameters=LONGROPE | {"long_factor": listed})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_llama.make(tmp_path_factory.mktemp("llama"))


def parse(made, **changes):
    config = copy.deepcopy(tiny.read_config(made.folder)) | changes
    return registry.read_config({name: value for name, value in config.items() if value != "gone"})


def test_defaults(plain):
    """What older configs leave out or write as null, and where they write their rope."""
    config = parse(plain)
    assert config.attention.head_dim == config.rotary_dim == 12
    assert config.delta_net is None and config.moe is None and set(config.layer_types) == {"full_attention"}
    rope = {"rope_parameters": "gone", "rope_theta": 10000.0, "rope_scaling": None}
    assert parse(plain, **rope, head_dim=None, attention_bias=None, mlp_bias="gone") == config
    assert parse(plain, num_key_value_heads=None).attention.num_kv_heads == 4
    older = {"rope_parameters": "gone", "rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_theta": 5e5}}
    assert parse(plain, **older) == parse(plain, rope_parameters=LLAMA3 | {"rope_theta": 5e5})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "gone"),
        ("num_attention_heads", 5),
        ("num_key_value_heads", 3),
        ("head_dim", 0),
        ("hidden_act", "gelu"),
        ("attention_bias", "yes"),
        ("mlp_bias", 1),
        ("intermediate_size", None),
        ("rope_type", "xpos"),
        ("rope_type", ["linear"]),
        ("factor", 0),
        ("factor", "8"),
        ("low_freq_factor", None),
        ("high_freq_factor", 1.0),
        ("original_max_position_embeddings", None),
    ],
)
def test_a_config_value_that_cannot_be(plain, field, value):
    changes = {field: value} if field not in LLAMA3 else {"rope_parameters": LLAMA3 | {field: value}}
    if field == "num_attention_heads":
        changes |= {"head_dim": None, "num_key_value_heads": 5}
    with pytest.raises(ConfigError, match=rf"config\.json.*\b{field}\b"):
        parse(plain, **changes)


def test_biases_the_config_does_not_tell_of_are_refused(tmp_path):
    made = tiny_llama.make(tmp_path, attention_bias=True, mlp_bias=True)
    config = tiny.read_config(tmp_path) | {"attention_bias": False, "mlp_bias": False}
    tiny.write(tmp_path, config, tiny.tensors(made))
    with pytest.raises(CheckpointError, match="bias"):
        load(tmp_path)


def test_without_a_head(tmp_path):
    made = tiny_llama.make(tmp_path, head=False)
    prompt = random_tokens(made.vocab_size, 9, seed=4)
    llm = LLM(tmp_path, device="cpu")
    assert (
        llm.mtp_refusal is not None and len(llm.generate(prompt, SamplingParams(max_tokens=4)).token_ids) == 4
    )
    with pytest.raises(HeadError, match="no MTP head"):
        LLM(tmp_path, device="cpu", mtp="on")
