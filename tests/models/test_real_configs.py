"""Checkpoints shaped like published ones: each module read as it is stored, and the config corrected where it lies."""

import re

import pytest
import torch

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.config import EngineConfig
from headlong.engine.build import survey
from headlong.errors import HeadlongError
from support import artifacts, packing_bits
from support.artifacts import RELEASES, Artifact
from support.steps import Driver, load
from support.tiny import random_tokens

SCRIPT = random_tokens(128, 24, seed=1)
PROMPTS = [random_tokens(128, count, seed=count) for count in (5, 11)]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 21}]


@pytest.fixture(scope="module", params=RELEASES)
def artifact(request, tmp_path_factory) -> Artifact:
    return artifacts.make(tmp_path_factory.mktemp("artifact"), request.param)


def label(how: str, columns: int) -> str:
    """What the format of a module is to be called, from how it was packed."""
    fixed = {
        "bf16": "bf16",
        "fp8_block": "fp8 128x128",
        "fp8_static": "fp8 tensor",
        "nvfp4_modelopt": "nvfp4",
    }
    if how in fixed:
        return fixed[how]
    family, bits, wanted = {
        "gptq_v1": ("gptq ", 4, 128),
        "awq": ("awq ", 4, 128),
        "int4_g32": ("", 4, 32),
        "mlx4": ("mlx ", 4, 64),
        "mlx8": ("mlx ", 8, 64),
    }[how]
    group = packing_bits.fitting_group(columns, wanted)
    is_whole = group == columns and how in ("gptq_v1", "awq")
    return f"{family}int{bits} {'channel' if is_whole else f'group {group}'}"


def test_every_module_is_read_as_it_is_stored(artifact):
    blueprint = survey(Checkpoint.open(artifact.folder))
    assert blueprint.head_refusal is None
    wanted = {module: label(how, shape[-1]) for module, (how, shape) in artifact.packed.items()}
    for name, _ in blueprint.names.copies:
        del wanted[f"mtp.layers.0.{name.removesuffix('.weight')}"]
    found = {name.removesuffix(".weight"): format.label for name, format in blueprint.formats.items()}
    assert found == wanted


def test_the_config_is_corrected_exactly_where_it_lies(artifact):
    blueprint = survey(Checkpoint.open(artifact.folder))
    lied_of = {module for module in artifact.packed if re.fullmatch(artifact.release.lies, module)}
    assert blueprint.detector.disagreements.keys() == lied_of, blueprint.detector.disagreements
    for module, sentence in blueprint.detector.disagreements.items():
        how, shape = artifact.packed[module]
        assert sentence.endswith(f"the tensors are {label(how, shape[-1])}")


def test_the_397b_config_forgets_the_head(tmp_path):
    made = artifacts.make(tmp_path, "nvidia--Qwen3.5-397B-A17B-NVFP4")
    sentence = survey(Checkpoint.open(made.folder)).detector.disagreements["mtp.fc"]
    assert sentence == "the config says nvfp4 (quant_algo 'NVFP4'), the tensors are bf16"


def test_dynamic_rules_that_claim_a_bf16_head(tmp_path):
    made = artifacts.make(tmp_path, "AutoRound--Qwen3.6-27B-W4A16-GPTQ")
    found = survey(Checkpoint.open(made.folder), EngineConfig(mtp="on")).detector.disagreements
    assert len(found) == 8 and all(module.startswith("mtp.") for module in found)
    assert set(found.values()) == {"the config says gptq (dynamic rule '+:.*mtp.*'), the tensors are bf16"}


def test_logits_are_those_of_the_dequantised_weights(artifact):
    driver = Driver(load(artifact.folder))
    driver.open("a", SCRIPT)
    found = driver.feed("a", [len(SCRIPT) - 1])
    hidden, logits = artifact.made.forward(SCRIPT[:-1])
    torch.testing.assert_close(found.logits, logits, atol=2e-4, rtol=1e-4)
    # And the head's, without which wrong weights would only show in the acceptance.
    carry = driver.state.carry_SD[driver.state.rows["a"].slot]
    torch.testing.assert_close(carry, artifact.made.pairs(SCRIPT[1:], hidden)[-1], atol=2e-4, rtol=1e-4)


def generate(folder, **options):
    llm = LLM(folder, device="cpu", max_rows=2, **options)
    for sampling in SAMPLINGS:
        yield llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True, **sampling))


def test_tokens_are_the_same_with_and_without_drafts(artifact):
    drafted = list(generate(artifact.folder, mtp="on", draft_tokens=3))
    plain = list(generate(artifact.folder, mtp="off"))
    for with_drafts, without in zip(drafted, plain, strict=True):
        assert [c.token_ids for c in with_drafts] == [c.token_ids for c in without]
        assert all(c.stats.mtp for c in with_drafts) and not any(c.stats.mtp for c in without)


@pytest.mark.parametrize("file", artifacts.unsupported())
def test_other_families_are_refused_in_a_sentence(file, tmp_path):
    (tmp_path / "config.json").write_text((artifacts.CONFIGS / file).read_text())
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    kind = artifacts.read_config(file)["model_type"]
    with pytest.raises(HeadlongError) as caught:
        LLM(tmp_path, device="cpu")
    message = str(caught.value)
    assert message.startswith(f"config.json: model_type '{kind}' is not supported; Headlong serves ")
    assert "\n" not in message
