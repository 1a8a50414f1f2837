"""`headlong convert`: there and back, against the tensors it began with, the gguf package and transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.cli import convert
from headlong.convert.from_gguf import from_gguf
from headlong.convert.to_gguf import TYPES, to_gguf
from support import tiny, tiny_llama
from support.command import Headlong

SAME_HEADS = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def stored(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in GGUFReader(path).tensors}


def values(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a GGUF file as the gguf package unpacks it."""
    return {
        name: torch.from_numpy(dequantize(np.array(t.data), t.tensor_type)).view(*reversed(t.shape.tolist()))
        for name, t in stored(path).items()
    }


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def tale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in float32, which loses nothing."""
    path = tmp_path_factory.mktemp("tale") / "tale.gguf"
    to_gguf(Checkpoint.open(EMBEDDED), path, type="f32")
    return path


@pytest.fixture(scope="module")
def back(tale: Path) -> Path:
    """That file as a folder again."""
    out = tale.parent / "back"
    from_gguf(Checkpoint.open(tale), out)
    return out


def test_there_and_back_gives_the_same_tensors(back: Path) -> None:
    before, after = weights(EMBEDDED), weights(back)
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert after[name].dtype is torch.bfloat16
        assert torch.equal(after[name], weight), name
    assert sorted(path.name for path in back.iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]


def test_configs_come_back(back: Path) -> None:
    before, after = read(EMBEDDED / "config.json"), read(back / "config.json")
    lost = (
        "initializer_range",
        "attention_dropout",
        "full_attention_interval",
        "bos_token_id",
        "eos_token_id",
    )
    kept = {key: value for key, value in before.items() if key not in lost}
    assert {key: after.get(key) for key in kept} == kept
    assert "linear_value_heads_tiled" not in after
    generation, original = (read(folder / "generation_config.json") for folder in (back, EMBEDDED))
    assert generation == original  # numbers too, although GGUF keeps them as float32
    # transformers accepts the folder as it is.
    model = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"


def test_tokenizer_comes_back(back: Path) -> None:
    before, after = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (EMBEDDED, back))
    for text in ("A shy dragon, 12 cakes.\n\n  naïve — «да» 🙂", "<|im_start|>user\nHi<|im_end|>\n"):
        assert before.encode(text).ids == after.encode(text).ids
    template = (EMBEDDED / "chat_template.jinja").read_text(encoding="utf-8")
    assert read(back / "tokenizer_config.json")["chat_template"] == template


def test_metadata_is_complete(tale: Path) -> None:
    fields = {key: field.contents() for key, field in GGUFReader(tale).fields.items()}
    assert fields["general.architecture"] == "qwen35" and fields["general.name"] == "tale-20m"
    assert fields["general.file_type"] == 0 and fields["general.quantization_version"] == 2
    assert fields["qwen35.block_count"] == 9 and fields["qwen35.nextn_predict_layers"] == 1
    assert fields["general.sampling.temp"] == pytest.approx(0.7)
    assert fields["general.sampling.penalty_repeat"] == pytest.approx(1.15)
    assert len(fields["tokenizer.ggml.tokens"]) == 8192
    assert fields["tokenizer.ggml.eos_token_id"] == 2 and fields["tokenizer.ggml.eot_token_id"] == 0
    assert "im_start" in fields["tokenizer.chat_template"]


def test_the_engine_reads_what_was_converted(tale: Path) -> None:
    found = []
    for model in (EMBEDDED, tale):
        llm = LLM(model, device="cpu", dtype="float32", mtp="on")
        completion = llm.generate("Explain rain to a child.", SamplingParams(max_tokens=16, temperature=0.0))
        found.append(list(completion.token_ids))
    assert found[0] == found[1]


@pytest.mark.parametrize("type", TYPES)
def test_types(headlong: Headlong, tmp_path: Path, type: str) -> None:
    """Matrices take the type; what llama.cpp wants in float32 keeps it; the head may differ."""
    made = tiny.make(tmp_path / "tiny", hidden_size=64, intermediate_size=96, **SAME_HEADS)
    out = tmp_path / "out.gguf"
    done = headlong("convert", str(made.folder), "-o", str(out), "--type", type, "--head-type", "q8_0")
    assert done.code == 0 and "57 tensors" in done.out and "with an MTP head" in done.out
    kinds = {name: tensor.tensor_type.name for name, tensor in stored(out).items()}
    assert kinds["blk.0.ffn_up.weight"] == kinds["blk.1.attn_q.weight"] == type.upper()
    assert kinds["blk.3.ffn_up.weight"] == kinds["blk.3.nextn.eh_proj.weight"] == "Q8_0"
    for name in ("token_embd.weight", "output.weight"):
        assert kinds[name] == ("Q8_0" if type.startswith("q") else type.upper())
    for name in ("ssm_conv1d.weight", "ssm_a", "ssm_dt.bias", "ssm_norm.weight", "attn_norm.weight"):
        assert kinds[f"blk.0.{name}"] == "F32"
    original = tiny.tensors(made)["model.layers.0.mlp.up_proj.weight"]
    error = (values(out)["blk.0.ffn_up.weight"] - original).norm() / original.norm()
    assert error < {"f32": 1e-9, "f16": 1e-3, "bf16": 1e-2, "q8_0": 1e-2}.get(type, 0.15)


def test_the_command_offers_every_type() -> None:
    assert convert.TYPES == TYPES


def test_rows_that_blocks_do_not_fill_become_f16(headlong: Headlong, tmp_path: Path) -> None:
    tiny.make(tmp_path / "tiny", **SAME_HEADS)  # 48 columns
    headlong("convert", str(tmp_path / "tiny"), "-o", str(tmp_path / "out.gguf"), "--type", "q4_0")
    kinds = {name: tensor.tensor_type.name for name, tensor in stored(tmp_path / "out.gguf").items()}
    assert kinds["blk.0.ffn_up.weight"] == "F16" and kinds["blk.0.ssm_out.weight"] == "Q4_0"


def assert_same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Bit for bit, but for the values that a GGUF file stores in another form."""
    assert after.keys() == before.keys()
    for name, weight in before.items():
        rounded = name.endswith(("norm.weight", "A_log")) or "pre_fc_norm" in name
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6 if rounded else 0.0, msg=name)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("dense", {}),
        ("dense", {"wrapped": True, "tie_word_embeddings": True}),
        ("dense", {"linear_num_value_heads": 2, "head": False}),
        ("dense", {"num_hidden_layers": 2, "layer_types": [tiny.FULL, tiny.LINEAR]}),
        ("moe", {}),
        ("moe", {"experts": "apart", "linear_num_value_heads": 6}),
    ],
)
def test_tiny_models_there_and_back(
    headlong: Headlong, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    made = tiny.make(tmp_path / "tiny", family, seed=5, **options)
    for source, out in (("tiny", "out.gguf"), ("out.gguf", "back")):
        done = headlong("convert", str(tmp_path / source), "-o", str(tmp_path / out), "--type", "f32")
        assert done.code == 0, done.err
        assert "no tokenizer" in done.err
    before = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in tiny.tensors(made).items()
        if ".visual." not in name
    }
    assert_same(before, weights(tmp_path / "back"))


def test_value_heads_are_tiled(tmp_path: Path) -> None:
    """Two key heads, three value heads each: number h of the file is key head h % 2's, and was number h // 2 of its."""
    key_heads, repeats, dim = 2, 3, 12
    made = tiny.make(tmp_path / "tiny", seed=6, linear_num_value_heads=6)
    to_gguf(Checkpoint.open(tmp_path / "tiny"), tmp_path / "out.gguf", type="f32")
    found, original = values(tmp_path / "out.gguf"), tiny.tensors(made)
    before = 2 * key_heads * 8

    def layer(name: str) -> torch.Tensor:
        return original[f"model.layers.0.linear_attn.{name}"]

    for head in range(key_heads * repeats):
        was = head % key_heads * repeats + head // key_heads
        here, there = (slice(number * dim, (number + 1) * dim) for number in (head, was))
        assert torch.equal(found["blk.0.attn_gate.weight"][here], layer("in_proj_z.weight")[there])
        for name, source in (
            ("attn_qkv.weight", "in_proj_qkv.weight"),
            ("ssm_conv1d.weight", "conv1d.weight"),
        ):
            assert torch.equal(
                found[f"blk.0.{name}"][before:][here], layer(source).squeeze(1)[before:][there]
            )
            assert torch.equal(found[f"blk.0.{name}"][:before], layer(source).squeeze(1)[:before])
        assert torch.equal(found["blk.0.ssm_out.weight"][:, here], layer("out_proj.weight")[:, there])
        assert torch.equal(found["blk.0.ssm_alpha.weight"][head], layer("in_proj_a.weight")[was])
        assert torch.equal(found["blk.0.ssm_beta.weight"][head], layer("in_proj_b.weight")[was])
        assert torch.equal(found["blk.0.ssm_dt.bias"][head], layer("dt_bias")[was])
        torch.testing.assert_close(found["blk.0.ssm_a"][head], -layer("A_log")[was].exp())


def test_experts_lie_in_three_tensors(tmp_path: Path) -> None:
    made = tiny.make(tmp_path / "tiny", "moe", seed=7)
    to_gguf(Checkpoint.open(tmp_path / "tiny"), tmp_path / "out.gguf", type="f32")
    found, original = values(tmp_path / "out.gguf"), tiny.tensors(made)
    for block, prefix in (("blk.1", "model.layers.1"), ("blk.3", "mtp.layers.0")):
        gate, up = original[f"{prefix}.mlp.experts.gate_up_proj"].chunk(2, dim=1)
        assert torch.equal(found[f"{block}.ffn_gate_exps.weight"], gate)
        assert torch.equal(found[f"{block}.ffn_up_exps.weight"], up)
        assert torch.equal(
            found[f"{block}.ffn_down_exps.weight"], original[f"{prefix}.mlp.experts.down_proj"]
        )
        router = found[f"{block}.ffn_gate_inp_shexp.weight"]
        assert torch.equal(router, original[f"{prefix}.mlp.shared_expert_gate.weight"][0])


@pytest.mark.parametrize(
    ("type", "options"),
    [
        ("f32", {}),
        ("bf16", {"tie_word_embeddings": True}),
        ("f32", {"rope": LLAMA3, "head_dim": 16}),
        ("f32", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_llama_there_and_back(headlong: Headlong, tmp_path: Path, type: str, options: dict[str, Any]) -> None:
    made = tiny_llama.make(tmp_path / "tiny", seed=8, **options)
    for source, out, wanted in (("tiny", "out.gguf", type), ("out.gguf", "back", "f32")):
        done = headlong("convert", str(tmp_path / source), "-o", str(tmp_path / out), "--type", wanted)
        assert done.code == 0, done.err
        assert ("llama.cpp reads no MTP head" in done.err) == (out == "out.gguf")
    before, after = tiny.tensors(made), weights(tmp_path / "back")
    assert after.keys() == before.keys()
    for name, weight in before.items():
        expected = weight.bfloat16().float() if type == "bf16" and weight.dim() == 2 else weight
        assert torch.equal(after[name], expected), name
    q = values(tmp_path / "out.gguf")["blk.0.attn_q.weight"]
    assert not torch.equal(q, after["model.layers.0.self_attn.q_proj.weight"])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    torch.testing.assert_close(again.model.rotary_emb.inv_freq, made.text.rotary_emb.inv_freq)


def test_a_quantised_file_is_unpacked(headlong: Headlong, tmp_path: Path) -> None:
    tiny.make(tmp_path / "tiny", hidden_size=64, intermediate_size=96, **SAME_HEADS)
    packed = tmp_path / "packed.gguf"
    to_gguf(Checkpoint.open(tmp_path / "tiny"), packed, type="q5_1", head_type="q8_0")
    assert headlong("convert", str(packed), "-o", str(tmp_path / "back"), "--type", "f32").code == 0
    found, expected = weights(tmp_path / "back"), values(packed)
    for name, disk in (
        ("model.layers.2.mlp.down_proj.weight", "blk.2.ffn_down.weight"),
        ("model.layers.1.self_attn.o_proj.weight", "blk.1.attn_output.weight"),
        ("mtp.fc.weight", "blk.3.nextn.eh_proj.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
    ):
        assert torch.equal(found[name], expected[disk])


def test_existing_outputs_are_kept(headlong: Headlong, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("mine")
    refused = headlong("convert", "tale-20m", "-o", str(out))
    assert refused.code == 2 and "--force" in refused.err and out.read_text() == "mine"
    assert headlong("convert", "tale-20m", "-o", str(out), "--force").code == 0
    assert len(stored(out)) == 123
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear")
    for flags in ([], ["--force"]):
        refused = headlong("convert", str(out), "-o", str(folder), *flags)
        assert refused.code == 2 and refused.err.count("\n") == 1
    assert (folder / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("out", ["out.gguf", "back"])
def test_an_interrupt_leaves_nothing(
    headlong: Headlong, tale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    def interrupt(label: str, done: int, total: int) -> None:  # noqa: ARG001 - progress takes all three
        if 2 * done > total:
            raise KeyboardInterrupt

    monkeypatch.setattr("headlong.cli.convert.default_progress", lambda: interrupt)
    model = "tale-20m" if out.endswith(".gguf") else str(tale)
    assert headlong("convert", model, "-o", str(tmp_path / out)).code == 130
    assert list(tmp_path.iterdir()) == []


def broken_head(folder: Path) -> None:
    """All of the embedded model but one tensor of its head."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    save_file(
        {k: v for k, v in weights(EMBEDDED).items() if k != "mtp.fc.weight"}, folder / "model.safetensors"
    )


def partly_dense(folder: Path) -> None:
    """A model of experts whose first layer has a plain MLP."""
    found = tiny.tensors(tiny.make(folder, "moe"))
    found = {name: tensor for name, tensor in found.items() if not name.startswith("model.layers.0.mlp.")}
    shapes = {"gate_proj": (80, 48), "up_proj": (80, 48), "down_proj": (48, 80)}
    found |= {f"model.layers.0.mlp.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    config = tiny.read_config(folder) | {"mlp_only_layers": [0], "intermediate_size": 80}
    tiny.write(folder, config, found)


def test_refusals(headlong: Headlong, tale: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    broken_head(tmp_path / "broken")
    tiny.make(tmp_path / "next", "next")
    partly_dense(tmp_path / "partly")
    out, folder = str(tmp_path / "out.gguf"), str(tmp_path / "folder")
    cases = [
        ((str(tale), "-o", out), "is GGUF already"),
        (("tale-20m", "-o", folder), "is safetensors already"),
        ((str(tale), "-o", folder, "--type", "q8_0"), "'q8_0'"),
        ((str(tale), "-o", folder, "--head-type", "q4_0"), "'q4_0'"),
        (("tale-20m", "-o", out, "--type", "q3_k"), "q3_k"),
        (("tale-20m",), "-o"),
        (("tale-20m", "-o", " "), "--out"),
        (("tale-20m", "-o", str(tmp_path / "none" / "out.gguf")), "cannot be written"),
        ((str(tmp_path / "broken"), "-o", out), "mtp.fc.weight"),
        ((str(tmp_path / "next"), "-o", out), "qwen3_next"),
        ((str(tmp_path / "partly"), "-o", out), "no experts"),
    ]
    for words, expected in cases:
        done = headlong("convert", *words)
        assert done.code == 2 and expected in done.err and done.out == "", words
    assert not Path(out).exists() and not Path(folder).exists()
