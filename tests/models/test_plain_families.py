"""Families of plain layers against transformers: logits, tokens, heads, GGUF; the same tokens whoever drafts.

Every row of `tiny.FAMILIES` that has plain layers is tested here; a new family of them needs no more than its row.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.convert.from_gguf import from_gguf
from headlong.convert.to_gguf import to_gguf
from headlong.errors import ConfigError
from headlong.models import registry
from support import tiny
from support.gguf_models import GgufModel, experts_by_projection
from support.steps import Chunk, Decode, Driver, load
from support.tiny import FAMILIES, GGUF_FAMILIES, PLAIN_FAMILIES, random_tokens

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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
ODD = {
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 14,
    "hidden_size": 35,
    "vocab_size": 61,
}
EACH = {
    "grouped": {},
    "ungrouped, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "odd sizes": ODD | {"intermediate_size": 50, "rms_norm_eps": 1e-6},
}
BIASED = {"attention_bias": True}
ODD_LATENTS = {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "hidden_size": 35,
    "vocab_size": 61,
    "q_lora_rank": 17,
    "kv_lora_rank": 19,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "intermediate_size": 50,
    "moe_intermediate_size": 11,
    "rms_norm_eps": 0.1,
}
OWN = {
    "llama": {
        "biased": BIASED | {"mlp_bias": True},
        "llama3": {"rope": LLAMA3, "head_dim": 16, "num_hidden_layers": 2},
        "yarn": {"rope": YARN, "head_dim": 16},
        "yarn, its own magnitude": {
            "rope": YARN | {"attention_factor": 1.7, "beta_fast": None, "beta_slow": None},
            "head_dim": 16,
        },
        "linear": {"rope": LINEAR},
        "dynamic": {"rope": DYNAMIC},
        "stored factors": BIASED | {"rope_factors": torch.linspace(1.0, 9.0, 6)},
        "heads of 64": {
            "head_dim": 64,
            "hidden_size": 192,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
    },
    "qwen3_moe": {
        "a dense layer": {"mlp_only_layers": [1], "norm_topk_prob": False},
        "every other layer": {"decoder_sparse_step": 2, "num_experts_per_tok": 1},
    },
    "glm4_moe": {
        "odd sizes": ODD | {"head_dim": 12, "intermediate_size": 50, "moe_intermediate_size": 11},
        "normed, groups": {
            "use_qk_norm": True,
            "attention_bias": False,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
        },
        "weights as they are": {"norm_topk_prob": False, "first_k_dense_replace": 0},
    },
    "deepseek_v3": {
        "odd sizes": ODD_LATENTS,
        "yarn": {"rope": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}, "first_k_dense_replace": 3},
        "queries at once, in halves": {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
    },
    "kimi_k2": {"yarn of one turn": {"rope": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0}}},
    "mistral": {"a window": {"sliding_window": 11}},
    "qwen2": {
        "later layers slide": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    },
    "gpt_oss": {
        "odd sizes, yarn": ODD
        | {
            "rope": YARN | {"truncate": False},
            "intermediate_size": 11,
            "sliding_window": 5,
            "swiglu_limit": 0.7,
        },
    },
    "qwen3": {
        "the first layer slides": {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        "biased": BIASED | {"head_dim": 24},
        "heads of 64": {"head_dim": 64, "rope": LLAMA3},
        "yarn": {"rope": YARN},
    },
}
"""Besides what is tested of each."""
SLIDING_LAST = ["full_attention", "full_attention", "sliding_attention"]
ONCE = ("deepseek_v3", "kimi_k2", "glm4_moe_lite", "gpt_oss")
"""Families that `EACH` does not suit: latent attention has no groups of heads, and experts no odd sizes of its own."""
CASES = [
    pytest.param((family, changes), id=f"{family}: {name}")
    for family in PLAIN_FAMILIES
    for name, changes in (({"as it is": {}} if family in ONCE else EACH) | OWN.get(family, {})).items()
]
CASES.append(
    pytest.param(("ministral", {"layer_types": SLIDING_LAST}), id="ministral: the last layer slides")
)


@pytest.fixture(scope="module", params=CASES)
def made(request, tmp_path_factory):
    family, changes = request.param
    return tiny.make(tmp_path_factory.mktemp(family), family, seed=3, **changes)


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_are_those_of_transformers(made, dtype):
    """A prompt whole, in pieces and token by token, beside other rows, native kernels and reference alike."""
    script = random_tokens(made.vocab_size, LENGTH + 1, seed=1)
    other = random_tokens(made.vocab_size, 24, seed=2)
    oracle = made.double() if dtype == "float64" else made
    hidden, logits = oracle.forward(script[:LENGTH])
    built = load(made.folder, dtype)
    driver = Driver(built)
    for row, tokens in (("whole", script), ("pieces", script), ("other", other)):
        driver.open(row, tokens)
    first = driver.step(Chunk("whole", LENGTH), Chunk("pieces", 17), Chunk("other", 20))
    second = driver.step(Chunk("pieces", 18), Decode("other"))
    rest = driver.decode("pieces", LENGTH - 35)
    assert_close(first["whole"].hidden, hidden)
    assert_close(first["whole"].logits, logits)
    found = [first["pieces"].logits, second["pieces"].logits, rest.logits]
    assert_close(torch.cat(found), logits)
    beside = torch.cat([first["other"].logits, second["other"].logits])
    assert_close(beside, oracle.forward(other[:21])[1])


def test_greedy_tokens_are_those_of_transformers(made):
    """In float64, where rounding decides no near-tie; drafts are on."""
    oracle, prompt = made.double(), random_tokens(made.vocab_size, 9, seed=4)
    tokens = list(prompt)
    for _ in range(16):
        tokens.append(int(oracle.forward(tokens)[1][-1].argmax()))
    llm = LLM(made.folder, device="cpu", dtype="float64", mtp="on")
    completion = llm.generate(prompt, SamplingParams(max_tokens=16))
    assert list(completion.token_ids) == tokens[len(prompt) :]


def slow_drafts(oracle, tokens, hidden, depth):
    """The head over all pairs again for every draft, each draft's pair made of the token and the head's own output."""
    drafts = []
    for _ in range(depth):
        out = oracle.pairs(tokens, hidden)[-1]
        drafts.append(int(oracle.model.lm_head(out).argmax()))
        tokens, hidden = [*tokens, drafts[-1]], torch.cat([hidden, out[None]])
    return drafts


@torch.no_grad()
def test_the_head_is_a_slow_one_on_transformers_layer(made):
    oracle, driver = made.double(), Driver(load(made.folder, "float64"))
    script = random_tokens(made.vocab_size, 60, seed=5)
    hidden = oracle.forward(script)[0]
    driver.open("a", script)
    driver.feed("a", [5, 12])
    for depth, accept in ((4, 0), (4, 2), (3, 3), (1, 0), (8, 5)):
        length = driver.length("a")
        carry = driver.state.carry_SD[driver.state.rows["a"].slot]
        assert_close(carry, oracle.pairs(script[1 : length + 1], hidden[:length])[-1])
        assert driver.propose("a", 4) == slow_drafts(oracle, script[1 : length + 1], hidden[:length], 4)
        driver.step(driver.draft("a", depth, accept, seed=length))


def test_rows_keep_their_bits_in_any_company(made):
    """A row alone and token by token, or in large steps among others that draft: the same hidden states."""
    built, rng = load(made.folder), random.Random(0)
    script, other = (random_tokens(made.vocab_size, 40, seed=seed) for seed in (6, 7))
    alone, among = Driver(built), Driver(built)
    alone.open("a", script)
    wanted = torch.cat([alone.feed("a", [1] * 30).hidden, alone.decode("a", 6).hidden])
    among.open("b", other)
    among.feed("b", [3])
    among.open("a", script)
    found = []
    for count in (13, 17):
        found.append(among.step(Chunk("a", count), among.draft("b", 3, rng.randrange(4), seed=count))["a"])
    found.append(among.step(among.draft("a", 4, 2, seed=1), among.draft("b", 2, 1, seed=2))["a"])
    found.append(among.step(Decode("a"), Decode("b"))["a"])
    found.append(among.step(among.draft("a", 3, 1, seed=3), Decode("b"))["a"])
    assert torch.equal(torch.cat([result.hidden for result in found]), wanted)


@pytest.fixture(scope="module", params=PLAIN_FAMILIES)
def plain(request, tmp_path_factory):
    return request.param, tiny.make(
        tmp_path_factory.mktemp(request.param), request.param, seed=8, vocab_size=6
    )


def tokens_of(llm, drafts):
    """Greedy and sampled by turns, of few tokens, so that what was said is said again."""
    prompts = [random_tokens(6, 3 + 7 * number, seed=number) for number in range(6)]
    params = [
        SamplingParams(max_tokens=20, temperature=0.9 * (n % 2), seed=n, draft_tokens=drafts, logprobs=1)
        for n in range(6)
    ]
    found = llm.generate(prompts, params)
    accepted = sum(completion.stats.accepted for completion in found)
    return [(completion.token_ids, completion.logprobs) for completion in found], accepted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("proposer", ["mtp", "ngram"])
def test_who_drafts_changes_no_token(plain, proposer, dtype):
    _, made = plain
    llm = LLM(made.folder, device="cpu", dtype=dtype, proposer=proposer, cache_tokens=4096, max_context=256)
    wanted, _ = tokens_of(llm, 0)
    for drafts in (1, 4):
        found, accepted = tokens_of(llm, drafts)
        assert found == wanted and accepted


def write_gguf(family, made, path: Path, kind: str) -> GgufModel:
    """By the gguf package's writer."""
    arch = FAMILIES[family].arch
    assert arch is not None
    model = GgufModel(tiny.read_config(made.folder), arch)
    for name, weight in experts_by_projection(tiny.tensors(made, head=False)).items():
        name = name.replace(".shared_experts.", ".shared_expert.")
        if arch == "deepseek2" and name.endswith("kv_b_proj.weight"):
            for half, part in _halves(weight, name, made):
                model.add(half, part, kind)
        else:
            model.add(name, _paired(weight, name, made) if arch == "llama" else weight, kind)
    model.write(path, head=False)
    return model


def _halves(weight, name, made):
    """What makes keys and values of latents, head by head; the keys' the other way round."""
    c = made.model.config
    heads = weight.view(c.num_attention_heads, -1, c.kv_lora_rank)
    keys, values = heads.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.mT.contiguous()
    yield name.replace("kv_b_proj", "v_b_proj"), values.contiguous()


def _paired(weight, name, made):
    """Llama's files have the two numbers of a rotary pair beside each other."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    dim = made.text.layers[0].self_attn.head_dim
    return weight.view(-1, 2, dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_is_the_same_model(family, tied, tmp_path):
    """Written by the gguf package, and by our own converter and back."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": tied}
    made = tiny.make(tmp_path / "made", family, seed=5, **sizes)
    write_gguf(family, made, tmp_path / "theirs.gguf", "F32")
    strip_head(made, tmp_path / "bare")
    to_gguf(Checkpoint.open(tmp_path / "bare"), tmp_path / "ours.gguf", type="f32")
    from_gguf(Checkpoint.open(tmp_path / "ours.gguf"), tmp_path / "back", type="f32")
    script = random_tokens(made.vocab_size, LENGTH + 1, seed=1)
    wanted = made.forward(script[:LENGTH])[1]
    for path in ("theirs.gguf", "ours.gguf", "back"):
        driver = Driver(load(tmp_path / path))
        driver.open("a", script)
        assert_close(driver.feed("a", [17, 24]).logits, wanted)
    config = registry.config_of(Checkpoint.open(tmp_path / "theirs.gguf"))
    read, known = registry.read_config(config), registry.read_config(tiny.read_config(made.folder))
    assert replace(read, model_type=known.model_type) == known  # Llama's files are Mistral's too


@pytest.mark.parametrize(
    "rope", [YARN, YARN | {"attention_factor": 1.7}, LINEAR], ids=["yarn", "its own", "linear"]
)
def test_gguf_keeps_what_positions_mean(rope, tmp_path):
    made = tiny.make(tmp_path / "made", "qwen3", seed=5, rope=rope)
    strip_head(made, tmp_path / "bare")
    to_gguf(Checkpoint.open(tmp_path / "bare"), tmp_path / "there.gguf", type="f32")
    from_gguf(Checkpoint.open(tmp_path / "there.gguf"), tmp_path / "back", type="f32")
    script = random_tokens(made.vocab_size, LENGTH + 1, seed=1)
    for path in ("there.gguf", "back"):
        driver = Driver(load(tmp_path / path))
        driver.open("a", script)
        assert_close(driver.feed("a", [17, 24]).logits, made.forward(script[:LENGTH])[1])


def strip_head(made, folder: Path) -> None:
    tiny.write(folder, tiny.read_config(made.folder), tiny.tensors(made, head=False))


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_packed_gguf_drafts_with_ngrams(family, tmp_path):
    made = tiny.make(
        tmp_path / "made",
        family,
        vocab_size=6,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
    )
    write_gguf(family, made, tmp_path / "model.gguf", "Q8_0")
    llm = LLM(tmp_path / "model.gguf", device="cpu", proposer="ngram", cache_tokens=4096, max_context=256)
    wanted, _ = tokens_of(llm, 0)
    found, accepted = tokens_of(llm, 3)
    assert found == wanted and accepted


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "mimo"])
def test_windows_are_mostly_off(family, tmp_path):
    config = tiny.read_config(tiny.make(tmp_path, family).folder)
    plain = registry.read_config(config)
    off = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2}
    assert registry.read_config(config | off) == plain
    config.pop("layer_types", None)
    on = registry.read_config(config | off | {"use_sliding_window": True})
    by_number = ("full_attention", "full_attention", "sliding_attention")
    assert on.layer_types == (("sliding_attention",) * 3 if family == "qwen3_moe" else by_number)
    assert on.window == 4096 and replace(on, window=None, layer_types=plain.layer_types) == plain
    sliding = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    with pytest.raises(
        ConfigError, match=r"layer_types has 'sliding_attention', but there is no sliding_window"
    ):
        registry.read_config(config | off | sliding)
    with pytest.raises(ConfigError, match="layer_types: 'linear_attention' is not supported, only 'full_att"):
        registry.read_config(config | {"layer_types": ["linear_attention"] * 3})
    with pytest.raises(ConfigError, match=r"layer_types must list 3"):
        registry.read_config(config | {"layer_types": ["full_attention"]})


def test_a_file_that_cannot_name_a_window_ends_there(tmp_path):
    """Up to there a model without one is the same; Llama's files, which Mistral has, know of none."""
    made = tiny.make(tmp_path / "made", "mistral", seed=2, sliding_window=24)
    with pytest.raises(ConfigError, match="sliding_window must be a whole number"):
        registry.read_config(tiny.read_config(made.folder) | {"sliding_window": "long"})
    strip_head(made, tmp_path / "bare")
    to_gguf(Checkpoint.open(tmp_path / "bare"), tmp_path / "there.gguf", type="f32")
    script = random_tokens(made.vocab_size, 25, seed=1)
    built = load(tmp_path / "there.gguf")
    assert built.model.config.max_position == 24
    driver = Driver(built)
    driver.open("a", script)
    assert_close(driver.feed("a", [24]).logits, made.forward(script[:24])[1])
