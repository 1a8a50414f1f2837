"""Whole models from GGUF files: every block type, the head inside, beside it, and packed in any way."""

import pytest
import torch
from safetensors.torch import save_file

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.engine.build import survey
from headlong.errors import CheckpointError, HeadError
from headlong.quant.gguf import BLOCK_SIZES
from support import tiny
from support.gguf_models import PLAIN, GgufModel, experts_by_projection, is_matrix
from support.steps import Driver, load
from support.tiny import random_tokens

SIZES = {
    # Rows of 256: what the larger block types need.
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
}
SCRIPT = random_tokens(96, 24, seed=3)
PROMPTS = [random_tokens(96, count, seed=count) for count in (3, 17)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("dense"), "dense", **SIZES)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("moe"), "moe", **SIZES)


def model_of(made, target: str, head: str, arch: str = "qwen35") -> GgufModel:
    model = GgufModel(tiny.read_config(made.folder), arch)
    weights = tiny.tensors(made)
    for name, weight in (experts_by_projection(weights) if arch == "qwen35moe" else weights).items():
        model.add(name, weight, head if name.startswith("mtp.") else target)
    return model


def write_floats(folder, made, meant: dict) -> None:
    tiny.write(folder, tiny.read_config(made.folder), {k: w.contiguous() for k, w in meant.items()})


def logits_of(path) -> torch.Tensor:
    driver = Driver(load(path))
    driver.open("a", SCRIPT)
    return driver.feed("a", [len(SCRIPT) - 1]).logits


def assert_drafts_change_nothing(path) -> None:
    llm = LLM(path, device="cpu", mtp="on")
    for sampling in ({}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}):
        runs = [
            [
                completion.token_ids
                for completion in llm.generate(
                    PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True, draft_tokens=drafts, **sampling)
                )
            ]
            for drafts in (0, 1, 3)
        ]
        assert runs[1] == runs[0] and runs[2] == runs[0]


ALIKE = ("IQ1_S", "IQ1_M", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")
"""Types that differ from others in how blocks are unpacked, and not in how models are loaded."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in ALIKE else ()) for kind in (*BLOCK_SIZES, *PLAIN)],
)
def test_every_type_with_every_kind_of_head(dense, tmp_path, kind):
    for number, head in enumerate(("BF16", kind, "Q5_1" if kind != "Q5_1" else "Q4_K")):
        model = model_of(dense, kind, head)
        path = tmp_path / f"{number}.gguf"
        model.write(path, head=True)
        blueprint = survey(Checkpoint.open(path))
        assert blueprint.head_refusal is None
        for name, format in blueprint.formats.items():
            assert format.label.upper() == (head if name.startswith("mtp.") else kind)
        write_floats(tmp_path / str(number), dense, model.meant)
        torch.testing.assert_close(logits_of(path), logits_of(tmp_path / str(number)), rtol=1e-4, atol=1e-4)
        assert_drafts_change_nothing(path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_experts(moe, tmp_path, kind):
    model = model_of(moe, kind, "BF16", "qwen35moe")
    model.write(tmp_path / "moe.gguf", head=True)
    meant = {}
    for name, weight in model.meant.items():
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        if weight.dim() == 3 and "experts" in name:
            if last == "gate_proj":
                up = model.meant[f"{stem}.up_proj.weight"]
                meant[f"{stem}.gate_up_proj"] = torch.cat([weight, up], dim=1)
            elif last == "down_proj":
                meant[f"{stem}.down_proj"] = weight
        else:
            meant[name] = weight
    write_floats(tmp_path / "floats", moe, meant)
    torch.testing.assert_close(
        logits_of(tmp_path / "moe.gguf"), logits_of(tmp_path / "floats"), rtol=1e-4, atol=1e-4
    )
    assert_drafts_change_nothing(tmp_path / "moe.gguf")


class TestSidecars:
    """A head in a file of its own beside a GGUF without one."""

    def target(self, dense, folder, kind="Q4_0", head="Q8_0"):
        model = model_of(dense, kind, head)
        model.write(folder / "model.gguf", head=False)
        return model

    def assert_as_one_file(self, model, folder, opened):
        model.write(folder / "whole" / "one.gguf", head=True)
        assert survey(Checkpoint.open(opened)).head_refusal is None
        drivers = [Driver(load(path)) for path in (opened, folder / "whole" / "one.gguf")]
        for driver in drivers:
            driver.open("a", SCRIPT)
            driver.feed("a", [len(SCRIPT) - 1])
        assert drivers[0].propose("a", 4) == drivers[1].propose("a", 4)
        assert_drafts_change_nothing(opened)

    @pytest.mark.parametrize("open_file", [True, False])
    def test_gguf(self, dense, tmp_path, open_file):
        (tmp_path / "whole").mkdir()
        model = self.target(dense, tmp_path)
        model.write(tmp_path / "mtp-model.gguf", head=True, only_head=True)
        self.assert_as_one_file(model, tmp_path, tmp_path / "model.gguf" if open_file else tmp_path)

    def test_safetensors(self, dense, tmp_path):
        (tmp_path / "whole").mkdir()
        model = self.target(dense, tmp_path, head="BF16")
        weights = {k: w for k, w in model.meant.items() if k.startswith("mtp.")}
        stored = {k: w.bfloat16() if is_matrix(k, w) else w for k, w in weights.items()}
        save_file({k: w.contiguous() for k, w in stored.items()}, tmp_path / "mtp.safetensors")
        self.assert_as_one_file(model, tmp_path, tmp_path / "model.gguf")

    def test_the_one_with_its_own_name_is_taken(self, dense, tmp_path):
        model = self.target(dense, tmp_path)
        model.write(tmp_path / "mtp-model.gguf", head=True, only_head=True)
        (tmp_path / "mtp-other.gguf").write_bytes(b"no GGUF at all")
        assert survey(Checkpoint.open(tmp_path / "model.gguf")).head_refusal is None

    def test_one_of_several_is_not_guessed(self, dense, tmp_path):
        model = self.target(dense, tmp_path)
        for name in ("mtp-a.gguf", "mtp-b.gguf"):
            model.write(tmp_path / name, head=True, only_head=True)
        assert "no MTP head" in survey(Checkpoint.open(tmp_path / "model.gguf")).head_refusal

    def test_a_head_inside_needs_none_beside(self, dense, tmp_path):
        model = model_of(dense, "Q4_0", "Q8_0")
        model.write(tmp_path / "model.gguf", head=True)
        (tmp_path / "mtp-model.gguf").write_bytes(b"no GGUF at all")
        assert survey(Checkpoint.open(tmp_path / "model.gguf")).head_refusal is None


def test_several_models_in_a_folder_are_named(dense, tmp_path):
    model = model_of(dense, "Q8_0", "Q8_0")
    for name in ("a.gguf", "b.gguf"):
        model.write(tmp_path / name, head=True)
    with pytest.raises(CheckpointError, match=r"2 GGUF models \(a.gguf, b.gguf\); pass the path of one"):
        Checkpoint.open(tmp_path)


def test_no_head_in_the_file(dense, tmp_path):
    model_of(dense, "Q8_0", "Q8_0").write(tmp_path / "m.gguf", head=False)
    assert "no MTP head" in LLM(tmp_path / "m.gguf", device="cpu").mtp_refusal
    with pytest.raises(HeadError, match="no MTP head"):
        LLM(tmp_path / "m.gguf", device="cpu", mtp="on")


def test_more_value_heads_than_key_heads(tmp_path):
    """The file tiles them; the converter's own test says which way, this one that the head works with it."""
    made = tiny.make(tmp_path / "made", "dense", **(SIZES | {"linear_num_key_heads": 2}))
    model = model_of(made, "Q8_0", "Q8_0")
    model.write(tmp_path / "m.gguf", head=True)
    blueprint = survey(Checkpoint.open(tmp_path / "m.gguf"))
    assert blueprint.config.delta_net.tiled
    assert_drafts_change_nothing(tmp_path / "m.gguf")
