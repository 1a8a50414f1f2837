"""The flags of `vllm serve` on `headlong serve`: those that set something, change nothing, or are refused."""

import argparse
import re
from pathlib import Path

import pytest

from headlong.cli import serve, settings_table, vllm_flags
from headlong.cli.main import build_parser
from headlong.errors import ConfigError
from headlong.server.settings import Settings
from headlong.server.settings_sources import load
from headlong.text.output import ChatFormat
from support.command import Headlong

DOCS = Path(__file__).parents[2] / "docs" / "server.md"


pytestmark = pytest.mark.usefixtures("loggers_put_back")


def settings_of(*words: str) -> Settings:
    _, commands = build_parser()
    args = commands["serve"].parse_intermixed_args(list(words), argparse.Namespace(command="serve"))
    return load(serve._given(args))


def test_the_documentation_has_the_table() -> None:
    assert settings_table.flags_table() in DOCS.read_text(encoding="utf-8"), (
        "docs/server.md is stale; run `python -m headlong.cli.settings_table`"
    )


def test_a_command_line_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(
        *(
            "Qwen/Qwen3.5-4B",
            "--served-model-name",
            "qwen",
            "gpt-4o",
            "--host",
            "127.0.0.1",
            "--port",
            "8001",
        ),
        *("--tensor-parallel-size", "1", "--dtype", "half", "--max-model-len", "32K", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "2k", "--gpu-memory-utilization", "0.85", "--no-enable-prefix-caching"),
        *("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder", "--enable-auto-tool-choice"),
        *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}', "--trust-remote-code"),
        *("--generation-config", "vllm", "--override-generation-config", '{"top_p": 0.9}'),
        *("--allowed-origins", '["https://a.example", "*"]', "--api-key", "a-key-for-tests"),
    )
    assert (settings.model, settings.served_names) == ("Qwen/Qwen3.5-4B", ("qwen", "gpt-4o"))
    assert (settings.host, settings.port) == ("127.0.0.1", 8001) and len(settings.api_keys) == 1
    assert settings.cors_origins == ("https://a.example", "*") and settings.sampling == {"top_p": 0.9}
    assert (settings.reasoning_format, settings.tool_format) == ("think", "qwen3_coder")
    assert settings.engine_options == {
        "dtype": "half",
        "max_context": 32768,
        "max_rows": 8,
        "chunk_tokens": 2000,
        "gpu_memory_fraction": 0.85,
        "prefix_cache": False,
        "mtp": "on",
        "draft_tokens": 3,
        "generation_config": "vllm",
    }
    told = capsys.readouterr().err
    for flag in ("--tensor-parallel-size", "--enable-auto-tool-choice", "--trust-remote-code"):
        assert f"headlong serve: {flag} changes nothing here: " in told
    assert told.count("\n") == 3


@pytest.mark.parametrize("flag", vllm_flags.FLAGS, ids=lambda flag: flag.names[0])
def test_every_flag_is_read(flag: vllm_flags.Flag) -> None:
    value = next(iter(flag.words), "1")
    following = [] if flag.takes == "nothing" else [value]
    for name in flag.names:
        _, commands = build_parser()
        args = commands["serve"].parse_intermixed_args([name, *following])
        if flag.refused:
            with pytest.raises(ConfigError, match=f"^{name} of vLLM's has no counterpart here: "):
                vllm_flags.translate(args.vllm)
            continue
        settings, notes = vllm_flags.translate(args.vllm)
        if flag.setting is None:
            assert not settings and len(notes) == 1 and notes[0].startswith(f"{name} changes nothing here: ")
        else:
            assert settings == {flag.setting: flag.words.get(value, value)} and not notes


def test_its_words_are_values_of_ours() -> None:
    for flag in vllm_flags.FLAGS:
        for word in flag.words.values():
            if flag.setting is not None:
                load({flag.setting: word})
    template = "{% if tools %}<tool_call><function=x>{% endif %}"
    for parser in ("qwen3_xml", "hermes"):
        chosen = settings_of("--tool-call-parser", parser).tool_format
        assert ChatFormat.detect(template, reasoning="auto", tools=chosen).tools == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--tensor-parallel-size 2", "--tensor-parallel-size 2: Headlong takes 1 here; one device computes a model"),
        ("-q fp8", "-q fp8: Headlong takes awq, awq_marlin"),
        ("--tool-call-parser pythonic", "Headlong takes hermes, qwen3_coder"),
        ("--kv-cache-dtype fp8", "Headlong takes auto here; keys and values are kept in the model's own type"),
        ("--enable-lora", "merge them into the weights"),
        ("--ssl-keyfile x", "a proxy in front of it"),
        ("--reasoning-parser qwen3 --reasoning-format none", "reasoning_format is given twice"),
        ("--model a --model b", "contradicts another flag that sets model"),
        ("a --model b", "model is given twice, as 'a' and as 'b'"),
        ("--served-model-name a tale-20m", "takes every word after it, 'tale-20m' too; put MODEL before it"),
        ("--max-model-len 32x", "--max-context must be a whole number, not '32x'"),
        ("--max-model-len 1.0001k", "--max-context must be a whole number, not '1.0001k'"),
        ("--max-model-len infk", "--max-context must be a whole number"),
        ("--dtype quarter", "dtype must be 'auto' or one of"),
        ("--override-generation-config {", "must be a JSON object"),
        ("--gpu-memory-utilisation 0.5", "did you mean --gpu-memory-utilization?"),
        ("--max-modle-len=5", "did you mean --max-model-len?"),
        ("--chat-template nowhere.jinja", "chat_template: 'nowhere.jinja' cannot be read"),
        ("--generation-config nowhere", "generation_config: 'nowhere' has no generation_config.json"),
        ("--max-model-len 5k", "max_context 5000 is above the 4096 tokens this model was made for"),
    ],
)  # fmt: skip
def test_mistakes(headlong: Headlong, words: str, complaint: str) -> None:
    done = headlong("serve", "--port", "0", *words.split())
    sentences = [line for line in done.err.splitlines() if not line.startswith("{")]
    assert done.code == 2 and len(sentences) == 1
    assert re.match("headlong serve: ", sentences[0]) and complaint in sentences[0]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25600),
        ("1.5K", 1536),
        ("1m", 10**6),
        ("1M", 1 << 20),
        ("2G", 2 << 30),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert load({"max_body_bytes": None, "cache_tokens": None, "prefix_host_bytes": text}).engine_options == {
        "prefix_host_bytes": size
    }


def test_as_much_as_fits() -> None:
    for word in ("auto", "-1"):
        assert settings_of(f"--max-model-len={word}").engine_options == {}


def test_types_by_other_names() -> None:
    from headlong.config import EngineConfig

    for alias, name in (("half", "float16"), ("float", "float32"), ("bf16", "bfloat16")):
        assert EngineConfig(dtype=alias, draft_dtype=alias) == EngineConfig(dtype=name, draft_dtype=name)


def test_commands_and_flags_that_were_meant(headlong: Headlong) -> None:
    for words, meant in (
        ("serv", "serve"),
        ("run --temprature 1 x", "--temperature"),
        ("chat --sytem x", "--system"),
    ):
        done = headlong(*words.split())
        assert done.code == 2 and f"(did you mean {meant}?)" in done.err and done.err.count("\n") == 1
    assert "did you mean" not in headlong("run", "--zzz", "x").err
