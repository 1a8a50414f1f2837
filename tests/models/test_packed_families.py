"""Every family in every popular packed format: logits are those of the floats that the codes stand for, whatever the
head is packed in. What Qwen3.5 shows of every format is not shown again."""

import pytest
import torch
from safetensors.torch import save_file

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.engine.build import survey
from headlong.quant.plain import PlainFormat
from support import tiny
from support.packed_models import LEFT_ALONE, packed, write, write_packed
from support.packing import pack, unpacked
from support.steps import Driver, load
from support.tiny import random_tokens

PLAIN = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
DENSE = PLAIN | {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = PLAIN | EXPERTS
LATENT |= {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 64}
LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES = {
    "qwen3_moe": DENSE | EXPERTS | {"num_experts": 4, "mlp_only_layers": [0]},
    "mimo": DENSE,
    "glm4_moe": DENSE | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "deepseek_v3": LATENT | GROUPS,
    "kimi_k2": LATENT | {"first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
}
POPULAR = (
    *(
        "fp8_block",
        "fp8_tensor",
        "fp8_channel",
        "int4_g32",
        "int8_channel",
        "gptq_v1",
        "awq",
        "nvfp4_modelopt",
    ),
    *("nvfp4_compressed", "mxfp4_compressed", "mlx4", "nf4", "torchao_int4", "torchao_fp8"),
)
SCRIPT = random_tokens(32, 18, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(family):
        if family not in made:
            made[family] = tiny.make(tmp_path_factory.mktemp(family), family, seed=2, **FAMILIES[family])
        return made[family]

    return model


def heads(how):
    """Left in bfloat16, packed alike, packed another way."""
    return (None, how, "int8_channel" if how != "int8_channel" else "nvfp4_modelopt")


def cases():
    """All of them are slow; by default every format has its turn, with the families and the heads by turns."""
    names = list(FAMILIES)
    return [
        pytest.param(
            family,
            how,
            head,
            marks=() if names[row % len(names)] == family and row % 3 == turn else pytest.mark.slow,
            id=f"{family}: {how}, {head}",
        )
        for row, how in enumerate(POPULAR)
        for family in names
        for turn, head in enumerate(heads(how))
    ]


def logits_of(folder):
    driver = Driver(load(folder))
    driver.open("a", SCRIPT)
    return driver.feed("a", [len(SCRIPT) - 1]).logits


def assert_drafts_change_nothing(folder):
    llm = LLM(folder, device="cpu", mtp="on", cache_tokens=1024, max_context=64)
    prompts = [random_tokens(32, count, seed=count) for count in (3, 17)]
    runs = []
    for drafts in (0, 3):
        params = [
            SamplingParams(max_tokens=8, ignore_eos=True, draft_tokens=drafts, temperature=0.9 * n, seed=n)
            for n in range(2)
        ]
        runs.append([completion.token_ids for completion in llm.generate(prompts, params)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("family", "how", "head"), cases())
def test_every_family_in_every_format(models, tmp_path, family, how, head):
    made = models(family)
    meant = write_packed(tmp_path / "packed", made, how, head, experts="apart")
    write(tmp_path / "floats", made, meant)
    blueprint = survey(Checkpoint.open(tmp_path / "packed"))
    assert blueprint.head_refusal is None
    for name, format in blueprint.formats.items():
        wanted = head if name.startswith("mtp.") else how
        is_plain = wanted is None or any(part in name for part in LEFT_ALONE)
        assert isinstance(format, PlainFormat) == is_plain, f"{name}: {format.label}"
    found, expected = logits_of(tmp_path / "packed"), logits_of(tmp_path / "floats")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert_drafts_change_nothing(tmp_path / "packed")


MLX_FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2", "glm4_moe_lite")


def as_mlx_names(made) -> dict[str, torch.Tensor]:
    """What MLX makes of a model before it packs it: no head, experts in one tensor for each projection, and what makes
    keys and values of latents as one tensor each, head by head."""
    found, c = {}, made.model.config
    for name, weight in tiny.tensors(made, head=False).items():
        stem = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            gate, up = weight.chunk(2, dim=1)
            switch = stem.replace(".experts", ".switch_mlp")
            found |= {f"{switch}.gate_proj.weight": gate, f"{switch}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found[f"{stem.replace('.experts', '.switch_mlp')}.down_proj.weight"] = weight
        elif name.endswith("kv_b_proj.weight"):
            heads = weight.view(c.num_attention_heads, -1, c.kv_lora_rank)
            keys, values = heads.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
            before = stem.removesuffix("kv_b_proj")
            found |= {f"{before}embed_q.weight": keys.mT, f"{before}unembed_out.weight": values}
        else:
            found[name] = weight
    return {name: weight.contiguous() for name, weight in found.items()}


@pytest.mark.parametrize("how", ["mlx4", pytest.param("mlx8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", MLX_FAMILIES)
def test_what_mlx_writes(models, tmp_path, family, how):
    """All but routers packed, embedding and lm_head too."""
    made, stored, meant = models(family), {}, {}
    write(tmp_path / "plain", made, as_mlx_names(made))
    wanted = made.forward(SCRIPT[:-1])[1]
    torch.testing.assert_close(logits_of(tmp_path / "plain"), wanted, rtol=1e-4, atol=1e-4)
    for name, weight in as_mlx_names(made).items():
        if weight.dim() < 2 or name.endswith("mlp.gate.weight"):
            stored[name] = meant[name] = weight
            continue
        each = [pack(one, how) for one in (weight if weight.dim() == 3 else [weight])]
        parts = {part: torch.stack([one[part] for one in each]) for part in each[0]}
        whole = torch.stack([unpacked(how, one, tuple(weight.shape[-2:])) for one in each])
        stem = name.removesuffix("weight")
        stored |= {stem + part: codes if weight.dim() == 3 else codes[0] for part, codes in parts.items()}
        meant[name] = whole if weight.dim() == 3 else whole[0]
    config = tiny.read_config(made.folder) | {"quantization": {"group_size": 64, "bits": int(how[3])}}
    tiny.write(tmp_path / "mlx", config, stored)
    save_file(stored, tmp_path / "mlx" / "model.safetensors", metadata={"format": "mlx"})
    write(tmp_path / "floats", made, meant)
    blueprint = survey(Checkpoint.open(tmp_path / "mlx"))
    assert blueprint.formats["lm_head.weight"].label.startswith("mlx int")
    torch.testing.assert_close(
        logits_of(tmp_path / "mlx"), logits_of(tmp_path / "floats"), rtol=1e-4, atol=1e-4
    )


def test_experts_alone_are_packed(models, tmp_path):
    """As in Kimi-K2-Thinking: its config says which matrices were left alone, and lies of none."""
    made = models("kimi_k2")
    weights = tiny.tensors(made, "apart", head=False)
    experts = {name: w for name, w in weights.items() if ".experts." in name}
    stored, meant = packed(experts, "int4_g32", None)
    rest = {name: w.bfloat16() for name, w in weights.items() if name not in experts}
    ints = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config = tiny.read_config(made.folder)
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": ints}},
        "ignore": [
            *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
    }
    tiny.write(tmp_path / "packed", config, stored | rest)
    write(tmp_path / "floats", made, meant | {name: w.float() for name, w in rest.items()})
    blueprint = survey(Checkpoint.open(tmp_path / "packed"))
    told = {name: format.label for name, format in blueprint.formats.items()}
    assert all(label.startswith("int4") == (".experts." in name) for name, label in told.items())
    lies = [sentence for name, sentence in blueprint.detector.disagreements.items() if "mlp.gate" not in name]
    assert not lies
    torch.testing.assert_close(
        logits_of(tmp_path / "packed"), logits_of(tmp_path / "floats"), rtol=1e-4, atol=1e-4
    )
