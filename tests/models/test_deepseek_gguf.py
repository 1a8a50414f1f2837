"""GGUF files of models with latent attention: what their metadata mean, both forms of them, and packed ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headlong import LLM, SamplingParams
from headlong.checkpoint import names
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.convert.from_gguf import from_gguf
from headlong.convert.to_gguf import to_gguf
from headlong.errors import CheckpointError
from headlong.models import registry
from headlong.models.glm4_moe import NAMING
from support import tiny
from support.gguf_models import GgufModel, experts_by_projection
from support.steps import Driver, load
from support.tiny import random_tokens

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
DEEPSEEK = {
    "general.architecture": "deepseek2",
    "deepseek2.block_count": 61,
    "deepseek2.context_length": 163840,
    "deepseek2.embedding_length": 7168,
    "deepseek2.feed_forward_length": 18432,
    "deepseek2.attention.head_count": 128,
    "deepseek2.attention.head_count_kv": 1,
    "deepseek2.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "deepseek2.attention.q_lora_rank": 1536,
    "deepseek2.attention.kv_lora_rank": 512,
    "deepseek2.attention.key_length": 576,
    "deepseek2.attention.value_length": 512,
    "deepseek2.attention.key_length_mla": 192,
    "deepseek2.attention.value_length_mla": 128,
    "deepseek2.expert_feed_forward_length": 2048,
    "deepseek2.expert_count": 256,
    "deepseek2.expert_used_count": 8,
    "deepseek2.expert_shared_count": 1,
    "deepseek2.expert_group_count": 8,
    "deepseek2.expert_group_used_count": 4,
    "deepseek2.expert_gating_func": 2,
    "deepseek2.expert_weights_norm": True,
    "deepseek2.expert_weights_scale": 2.5,
    "deepseek2.leading_dense_block_count": 3,
    "deepseek2.vocab_size": 129280,
    "deepseek2.rope.dimension_count": 64,
    "deepseek2.rope.freq_base": 10000.0,
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 40.0,
    "deepseek2.rope.scaling.original_context_length": 4096,
    "deepseek2.rope.scaling.yarn_beta_fast": 32.0,
    "deepseek2.rope.scaling.yarn_beta_slow": 1.0,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.10000000149011612,
}
"""What llama.cpp's own file of DeepSeek-V3 says."""
SPLIT = ("key_length_mla", "value_length_mla")
OLD = {key: value for key, value in DEEPSEEK.items() if not key.endswith(SPLIT)} | {
    "deepseek2.attention.head_count_kv": 128,
    "deepseek2.attention.key_length": 192,
    "deepseek2.attention.value_length": 128,
}
SIZES: dict[str, Any] = {
    # Rows of 256, what K-quants need; heads' keys have fewer, as in real files.
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}


def table(*names: str) -> dict[str, TensorInfo]:
    found = [TensorInfo(name, "F16", (129280, 7168), Path("m.gguf"), 0, 0) for name in names]
    return {info.name: info for info in found}


TENSORS = table("token_embd.weight", "output.weight", "blk.3.exp_probs_b.bias")


def real_config() -> dict[str, Any]:
    return json.loads((SHAPES / "deepseek-v3.json").read_text())


@pytest.mark.parametrize("metadata", [DEEPSEEK, OLD], ids=["split", "old"])
def test_metadata_mean_the_real_config(metadata: dict[str, Any]) -> None:
    read = registry.read_config(registry.config_from_gguf(metadata, TENSORS))
    known = registry.read_config(real_config())
    for field in (
        *("latent", "moe", "dense_layers", "rope_scaling", "rope_theta", "rotary_dim", "eps", "max_position"),
        *("layer_types", "vocab_size", "hidden_size", "intermediate_size", "tied", "attention"),
    ):
        assert getattr(read, field) == getattr(known, field), field


def test_what_is_written_is_what_llama_cpp_writes() -> None:
    found = registry.gguf_metadata(real_config(), head_layers=0)
    assert found == {
        key: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        for key, value in DEEPSEEK.items()
    }
    with_head = registry.gguf_metadata(real_config(), head_layers=1)
    assert with_head["deepseek2.block_count"] == 62 and with_head["deepseek2.nextn_predict_layers"] == 1


def test_without_a_query_rank() -> None:
    metadata = {key: value for key, value in DEEPSEEK.items() if "q_lora_rank" not in key}
    config = registry.config_from_gguf(metadata, TENSORS)
    latent = registry.read_config(config).latent
    assert latent is not None and latent.query_rank is None
    assert registry.gguf_metadata(config, head_layers=0)["deepseek2.attention.q_lora_rank"] == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.kv_lora_rank", None),
        ("attention.q_lora_rank", -1),
        ("attention.key_length_mla", 64),
        ("attention.value_length_mla", 0),
        ("rope.dimension_count", None),
        ("rope.scaling.type", "linear"),
        ("rope.scaling.attn_factor", 2.0),
        ("rope.scaling.yarn_log_multiplier", None),
        ("expert_gating_func", 3),
        ("expert_group_used_count", 9),
    ],
)
def test_damage_names_the_key(key: str, value: object) -> None:
    metadata = {k: v for k, v in DEEPSEEK.items() if k != f"deepseek2.{key}"}
    metadata |= {} if value is None else {f"deepseek2.{key}": value}
    with pytest.raises(CheckpointError) as caught:
        registry.config_from_gguf(metadata, TENSORS)
    assert str(caught.value).startswith(f"deepseek2.{key}: ") and "\n" not in str(caught.value)


def test_deepseek_v2_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"exp_probs_b.*DeepSeek-V2.*nearest.*DeepSeek-V3"):
        registry.config_from_gguf(DEEPSEEK, table("token_embd.weight"))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        YARN | {"mscale": 1.0},
        YARN | {"mscale": None, "mscale_all_dim": None},
    ],
    ids=["linear", "another magnitude", "no magnitude"],
)
def test_scalings_that_such_files_cannot_say(rope: dict[str, Any]) -> None:
    config = real_config() | {"rope_scaling": {name: v for name, v in rope.items() if v is not None}}
    with pytest.raises(CheckpointError, match="rope_parameters: a deepseek2 GGUF knows YaRN where"):
        registry.gguf_metadata(config, head_layers=0)


def logits_of(path: Path, script: list[int]) -> torch.Tensor:
    driver = Driver(load(path, "float64"))
    driver.open("a", script)
    return driver.feed("a", [9, len(script) - 10]).logits


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": YARN},
        {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ],
    ids=["yarn", "queries at once, in halves"],
)
def test_there_and_back_with_the_head(tmp_path: Path, changes: dict[str, Any]) -> None:
    made = tiny.make(tmp_path / "made", "deepseek_v3", seed=3, **changes)
    to_gguf(Checkpoint.open(made.folder), tmp_path / "there.gguf", type="f32")
    from_gguf(Checkpoint.open(tmp_path / "there.gguf"), tmp_path / "back", type="f32")
    script = random_tokens(made.vocab_size, 30, seed=1)
    wanted = made.forward(script[:-1])[1]
    drafts = []
    for path in (made.folder, tmp_path / "there.gguf", tmp_path / "back"):
        driver = Driver(load(path))
        driver.open("a", script)
        found = driver.feed("a", [9, 20]).logits
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0.0)
        drafts.append(driver.propose("a", 4))
    assert drafts[0] == drafts[1] == drafts[2]


def test_biases_have_no_place(tmp_path: Path) -> None:
    made = tiny.make(tmp_path / "made", "deepseek_v3", head=False, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"GGUF has no place for layers\.0\.self_attn\.q_a_proj\.bias"):
        to_gguf(Checkpoint.open(made.folder), tmp_path / "there.gguf", type="f32")


def packed(made: tiny.Tiny, kind: str, *, old: bool) -> GgufModel:
    """By the gguf package's writer, head and copies too; `old` files have one matrix for keys and values."""
    config = tiny.read_config(made.folder)
    model, c = GgufModel(config, "deepseek2"), made.model.config
    for disk, weight in experts_by_projection(tiny.tensors(made)).items():
        name = names.canonical(disk, NAMING, num_layers=config["num_hidden_layers"])
        assert isinstance(name, str)
        if name.endswith("kv_b_proj.weight") and not old:
            heads = weight.view(c.num_attention_heads, -1, c.kv_lora_rank)
            keys, values = heads.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
            model.add(name.replace("kv_b", "k_b"), keys.mT.contiguous(), kind)
            model.add(name.replace("kv_b", "v_b"), values.contiguous(), kind)
        else:
            model.add(name, weight, kind)
    return model


def meant(model: GgufModel) -> dict[str, torch.Tensor]:
    """What the blocks stand for, with one matrix for keys and values."""
    found = {}
    for name, weight in model.meant.items():
        if name.endswith(".k_b_proj.weight"):
            values = model.meant[name.replace("k_b", "v_b")]
            both = torch.cat([weight.mT, values], dim=1)
            found[name.replace("k_b", "kv_b")] = both.reshape(-1, values.shape[-1])
        elif not name.endswith(".v_b_proj.weight"):
            found[name] = weight
    return found


@pytest.mark.parametrize(
    ("kind", "old"),
    [
        ("Q4_K", False),
        ("Q8_0", True),
        pytest.param("Q6_K", True, marks=pytest.mark.slow),
        *(
            pytest.param(kind, False, marks=pytest.mark.slow)
            for kind in ("Q2_K", "Q5_K", "Q8_0", "IQ4_XS", "F16")
        ),
    ],
)
def test_packed_files(tmp_path: Path, kind: str, old: bool) -> None:
    """Logits are those of the floats that blocks stand for, and drafts change no token."""
    made = tiny.make(tmp_path / "made", "deepseek_v3", seed=6, rope=YARN, **SIZES)
    model, path = packed(made, kind, old=old), tmp_path / "model.gguf"
    model.write(path, head=True)
    from_gguf(Checkpoint.open(path), tmp_path / "floats", type="f32")
    floats, wanted = load_file(tmp_path / "floats" / "model.safetensors"), meant(model)
    for disk, weight in floats.items():
        name = names.canonical(disk, NAMING, num_layers=2)
        assert isinstance(name, str)
        if not name.endswith("gate_up_proj"):
            expected = wanted[name if name in wanted else f"{name}.weight"]
            torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7, msg=name)
    script = random_tokens(96, 30, seed=1)
    found = logits_of(path, script)
    torch.testing.assert_close(found, logits_of(tmp_path / "floats", script), rtol=1e-6, atol=1e-6)
    llm = LLM(path, device="cpu", mtp="on", cache_tokens=2048, max_context=128)
    prompts = [random_tokens(96, count, seed=count) for count in (3, 17)]
    runs = [
        [
            c.token_ids
            for c in llm.generate(
                prompts,
                SamplingParams(max_tokens=12, ignore_eos=True, draft_tokens=drafts, temperature=0.8, seed=1),
            )
        ]
        for drafts in (0, 3)
    ]
    assert runs[0] == runs[1]


def test_betas_that_llama_cpp_leaves_aside_are_told(tmp_path: Path) -> None:
    rope = YARN | {"beta_fast": 1.0, "beta_slow": 1.0}
    for folder, betas in (("kimi", {}), ("usual", {"beta_fast": 32.0})):
        made = tiny.make(tmp_path / folder, "kimi_k2", head=False, rope=rope | betas)
        notes = to_gguf(Checkpoint.open(made.folder), tmp_path / f"{folder}.gguf", type="f32").notes
        told = [note for note in notes if "beta_fast 32" in note]
        assert len(told) == (not betas) and all("this model has 1 and 1" in note for note in told)
