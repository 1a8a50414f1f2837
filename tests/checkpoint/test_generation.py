"""Recommended sampling: where it is read, what of it counts, and who may say otherwise."""

import json
from pathlib import Path

import pytest

from headlong.checkpoint import generation, packages
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.gguf_config import generation_config, sampling_metadata
from headlong.checkpoint.source import EMBEDDED
from headlong.config import EngineConfig
from headlong.engine.service import Service
from headlong.errors import CheckpointError, ConfigError
from headlong.params import SamplingParams


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": None}, {"temperature": 0.6}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": False, "top_p": 0.6}, {"top_p": 0.6, "temperature": 0.0}),
        ({"do_sample": True, "top_k": -1, "min_p": 0.1}, {"top_k": 0, "min_p": 0.1}),
        ({"do_sample": True, "eos_token_id": 2}, {}),
    ],
)  # fmt: skip
def test_fields_that_count(file, found):
    assert generation.sampling(file) == found
    SamplingParams(**found)


@pytest.mark.parametrize(("value", "length"), [(7, 7), (0, None), (True, None), ("9", None), (None, None)])
def test_length(value, length):
    assert generation.output_tokens({"max_new_tokens": value}) == length


def test_words():
    assert generation.in_words({"temperature": 0.7, "top_k": 40}) == "temperature 0.7, top_k 40"
    assert generation.in_words({"temperature": 0.0}) == generation.in_words({}) == "greedy"


def test_choices(tmp_path: Path):
    own = {"temperature": 0.5}
    assert generation.chosen("auto", own) == own
    assert generation.chosen("none", own) == generation.chosen("vllm", own) == {}
    with pytest.raises(
        ConfigError, match=r"generation_config: '.*' has no generation_config\.json; give auto"
    ):
        generation.chosen(str(tmp_path), own)
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    for other in (tmp_path, tmp_path / "generation_config.json"):
        assert generation.chosen(str(other), own) == {"top_k": 3}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        generation.chosen(str(tmp_path), own)


def test_numbers_survive_gguf():
    """A probability that is another by a millionth can be another token."""
    written = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.15}
    import struct

    kept = {
        key: struct.unpack("f", struct.pack("f", value))[0] if isinstance(value, float) else value
        for key, value in sampling_metadata(written).items()
    }
    assert kept["general.sampling.top_p"] != 0.9
    assert generation_config(kept) == {"do_sample": True} | written
    assert generation_config({"general.sampling.temp": 1e300})["temperature"] == 1e300


def test_a_file_beside_a_gguf_file(model_gguf: Path, tmp_path: Path):
    (tmp_path / model_gguf.name).symlink_to(model_gguf)
    opened = tmp_path / model_gguf.name
    assert Checkpoint.open(opened).generation_config["temperature"] == 0.7  # from the file's metadata
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    for path in (opened, tmp_path):
        found = Checkpoint.open(path).generation_config
        assert found["temperature"] == 0.25 and found["top_p"] == 0.9


@pytest.fixture(scope="module")
def model_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from headlong.convert.to_gguf import to_gguf

    out = tmp_path_factory.mktemp("gguf") / "tale.gguf"
    to_gguf(Checkpoint.open(EMBEDDED), out)
    return out


def test_a_head_brings_its_sampling():
    """SmolLM2's GGUF file recommends nothing; what lies beside our head of it does."""
    (head, sampling) = packages.PACKAGES["smollm2"].companions
    assert head.name == "mtp.safetensors"
    params = SamplingParams(**generation.sampling(json.loads(sampling.read_text())))
    assert 0 < params.temperature < 0.5 and params.repetition_penalty > 1


def test_who_ends_a_text_does_not_depend_on_who_says_how_to_sample(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 5, "eos_token_id": 77, "max_new_tokens": 9}')
    services = {
        choice: Service.load(None, EngineConfig(generation_config=choice, max_rows=1, cache_tokens=128))
        for choice in ("auto", "none", str(tmp_path))
    }
    assert services["auto"].eos_ids == services["none"].eos_ids == {0, 2}
    assert services[str(tmp_path)].eos_ids == {0, 2, 77}
    found = {choice: service.describe().recommended_params() for choice, service in services.items()}
    assert found["none"] == SamplingParams()
    assert found[str(tmp_path)] == SamplingParams(top_k=5, max_tokens=9)
    assert found["auto"] == services["auto"].recommended_params()
    assert found["auto"].temperature == 0.7
