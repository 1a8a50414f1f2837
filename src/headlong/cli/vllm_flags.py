"""The flags of `vllm serve`, in one table: what each of them does here.

A flag sets a setting of ours, or changes nothing that a client could see, or is refused with what comes nearest; flags
that `headlong serve` has under the same name stand in the settings themselves. `settings_table` writes the table into
docs/server.md. Reads no values beyond its own words: those are checked where the settings are.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headlong.errors import ConfigError
from headlong.text.format_names import REASONING_FORMATS, TOOL_FORMATS

TAKES = {"a value": None, "nothing": 0, "perhaps a value": "?", "values": "+"}
"""How many words follow a flag, as argparse counts them."""
FEW = 6


@dataclass(frozen=True)
class Flag:
    """One flag of vLLM's. Without a setting it changes nothing, or is refused."""

    names: tuple[str, ...]
    here: str
    """What stands in the documentation: what it does here, or why it does nothing and what comes nearest."""
    takes: str = "a value"
    setting: str | None = None
    """The setting that gets its value."""
    words: Mapping[str, str] = field(default_factory=dict)
    """The values that mean something here, with ours for them; empty for any."""
    refused: bool = False
    """Whether it would change what the server answers or how it runs in a way that Headlong cannot follow."""

    def __post_init__(self) -> None:
        assert self.takes in TAKES

    @property
    def kind(self) -> str:
        if self.setting is not None:
            return f"`{self.setting}`"
        return "refused" if self.refused else "no effect"


def _same(*words: str) -> dict[str, str]:
    return {word: word for word in words}


def _sets(names: str, setting: str, here: str, **more: Any) -> Flag:
    return Flag(tuple(names.split()), here, setting=setting, **more)


def _nothing(names: str, here: str, **more: Any) -> Flag:
    return Flag(tuple(names.split()), here, **more)


def _refused(names: str, here: str, **more: Any) -> Flag:
    return Flag(tuple(names.split()), here, refused=True, **more)


_ONE_DEVICE = (
    "one device computes a model; `--draft-device` puts its head on another, and for more requests run a server for "
    "each GPU behind a proxy"
)
_PROXY = "the server speaks plain HTTP under `/`; a proxy in front of it has TLS and paths"
_ADAPTERS = "no adapters are loaded while serving; merge them into the weights beforehand"
_CONFIG = "sizes and rotary scaling come from the checkpoint; change them in a copy of its config.json"
_THINK = dict.fromkeys(
    ("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "holo2", "ernie45", "mimo"), "think"
)

SHARED = (
    *("--host", "--port", "--api-key", "--allowed-origins", "--served-model-name", "--chat-template"),
    *("--generation-config", "--override-generation-config", "--dtype", "--device", "--max-model-len"),
    *("--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization", "--block-size"),
    *("--enable-prefix-caching", "--enable-log-requests"),
)
"""The flags that `headlong serve` has by the same name: they stand in the tables of settings."""

FLAGS = (
    _sets("--model", "model", "the same as MODEL"),
    _sets(
        "--reasoning-parser",
        "reasoning_format",
        "parsers that split `<think>` mean `think`; usually the chat template tells",
        words=_same(*REASONING_FORMATS, "none", "auto") | _THINK | {"openai_gptoss": "harmony"},
    ),
    _sets(
        "--tool-call-parser",
        "tool_format",
        "usually the chat template tells",
        words=_same(*TOOL_FORMATS, "none", "auto")
        | {"qwen3_xml": "qwen3_coder", "openai": "harmony", "llama4_json": "llama3_json"}
        | {"mistral": "auto"},  # it stands for both of Mistral's forms
    ),
    _sets("--num-speculative-tokens", "draft_tokens", "as in older versions of vLLM"),
    _sets(
        "--uvicorn-log-level",
        "log_level",
        "one level for all logs",
        words=_same("debug", "info", "warning", "error") | {"critical": "error", "trace": "debug"},
    ),
    _nothing(
        "--tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size -dp --nnodes --api-server-count",
        _ONE_DEVICE,
        words=_same("1"),
    ),
    _nothing("--enable-auto-tool-choice", "tools are chosen wherever the chat template has them", takes="nothing"),
    _nothing("--trust-remote-code", "no code of a checkpoint is ever run", takes="nothing"),
    _nothing(
        "--enable-chunked-prefill --no-enable-chunked-prefill",
        "prompts are always read in chunks, of `chunk_tokens`",
        takes="nothing",
    ),
    _nothing("--enforce-eager", "steps are CUDA graphs where that is possible, with the same tokens", takes="nothing"),
    _nothing("--swap-space", "rows that give way are read again; `--prefix-host-bytes` is for prefixes"),
    _nothing("--cpu-offload-gb", "weights lie on the device; `--draft-device cpu` moves the head", words=_same("0")),
    _nothing("--seed", "a request's `seed` repeats its text; without one each draws its own"),
    _nothing(
        "--load-format",
        "safetensors and GGUF are told from the files",
        words=_same("auto", "safetensors", "gguf", "hf", "fastsafetensors"),
    ),
    _nothing(
        "--quantization -q",
        "the tensors tell how each module is packed; `headlong quantize` packs one that is not",
        words=_same(
            *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "modelopt", "modelopt_fp4")
        ),
    ),
    _nothing("--kv-cache-dtype", "keys and values are kept in the model's own type", words=_same("auto")),
    _nothing("--tokenizer-mode", "tokenizer.json is read, by the library of that name", words=_same("auto", "hf")),
    _nothing("--task", "text is generated", words=_same("auto", "generate")),
    _nothing("--runner", "text is generated", words=_same("auto", "generate")),
    _nothing("--response-role", "answers are the assistant's", words=_same("assistant")),
    _nothing("--chat-template-content-format", "content reaches the template as it came"),
    _nothing("--guided-decoding-backend", "llguidance holds every grammar"),
    _nothing("--structured-outputs-config", "llguidance holds every grammar"),
    _nothing("--distributed-executor-backend", "one process computes"),
    _nothing("--scheduling-policy", "a request's `priority` always counts", words=_same("fcfs", "priority")),
    _nothing("--max-logprobs", "a request may always ask for up to 64"),
    _nothing("--limit-mm-per-prompt", "text alone is served"),
    _nothing("--language-model-only", "text alone is served", takes="nothing"),
    _nothing("--max-seq-len-to-capture --cuda-graph-sizes", "steps are recorded as they occur", takes="values"),
    _nothing("--compilation-config -O", "kernels are compiled as they are needed"),
    _nothing("--attention-backend --prefix-caching-hash-algo", "there is one"),
    _nothing("--num-scheduler-steps --preemption-mode --stream-interval", "there is one way to schedule"),
    _nothing("--max-num-partial-prefills --long-prefill-token-threshold", "`chunk_tokens` bounds what a step reads"),
    _nothing("--max-log-len", "prompts are logged whole or, without `--log-prompts`, not at all"),
    _nothing(
        "--disable-log-requests --disable-uvicorn-access-log",
        "a request is one line without its text; `--log-level warning` drops it",
        takes="nothing",
    ),
    _nothing(
        "--disable-log-stats --disable-frontend-multiprocessing --disable-custom-all-reduce --disable-cascade-attn "
        "--async-scheduling --no-async-scheduling --enable-request-id-headers --enable-prompt-tokens-details "
        "--enable-force-include-usage --enable-server-load-tracking --disable-fastapi-docs",
        "there is one way, or it is always so",
        takes="nothing",
    ),
    _refused("--speculative-model", "`--proposer draft --drafter MODEL` drafts with another model"),
    _refused("--tokenizer", "the tokenizer is the model's; put another tokenizer.json into a copy of its folder"),
    _refused("--revision --tokenizer-revision", "`headlong pull MODEL --revision R` prints the folder to serve"),
    _refused("--download-dir", "set HF_HOME, where models from Hugging Face are kept"),
    _refused("--hf-token", "set HF_TOKEN", takes="perhaps a value"),
    _refused("--num-gpu-blocks-override --kv-cache-memory-bytes", "`--cache-tokens` bounds the cache"),
    _refused("--enable-expert-parallel", _ONE_DEVICE, takes="nothing"),
    _refused("--enable-lora", _ADAPTERS, takes="nothing"),
    _refused("--lora-modules --max-loras --max-lora-rank", _ADAPTERS, takes="values"),
    _refused("--hf-overrides --rope-scaling --rope-theta", _CONFIG),
    _refused("--ssl-keyfile --ssl-certfile --ssl-ca-certs --root-path --uds", _PROXY),
    _refused("--allow-credentials", "`--cors-origins` names the pages; they send keys, not cookies", takes="nothing"),
    _refused("--middleware --logits-processors", "no code is loaded; requests have `logit_bias` and grammars"),
    _refused("--enable-sleep-mode", "`POST /v1/model/unload` frees a model's memory", takes="nothing"),
    _refused("--return-tokens-as-token-ids", "ask for `logprobs`, which have each token's bytes", takes="nothing"),
)  # fmt: skip


class _Collect(argparse.Action):
    """Puts the flag and its value into the list of those that were given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:  # noqa: ARG002
        given = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*given, (option_string, values)])


def add(parser: argparse.ArgumentParser) -> None:
    """Adds all of them, without lines in the help: the documentation has the table."""
    for flag in FLAGS:
        parser.add_argument(
            *flag.names, dest="vllm", action=_Collect, nargs=TAKES[flag.takes], help=argparse.SUPPRESS
        )


def translate(given: list[tuple[str, Any]] | None) -> tuple[dict[str, str], list[str]]:
    """The settings that these flags set, and a sentence for each that changes nothing."""
    settings: dict[str, str] = {}
    notes = []
    for name, value in given or []:
        flag = next(one for one in FLAGS if name in one.names)
        if flag.refused:
            raise ConfigError(f"{name} of vLLM's has no counterpart here: {flag.here.replace('`', '')}")
        if flag.words and value not in flag.words:
            known = list(flag.words)
            listed = ", ".join(known[:FEW]) + (", …" if len(known) > FEW else "")
            raise ConfigError(f"{name} {value}: Headlong takes {listed} here; {flag.here.replace('`', '')}")
        if flag.setting is None:
            notes.append(f"{name} changes nothing here: {flag.here.replace('`', '')}")
            continue
        value = flag.words.get(value, value)
        if settings.setdefault(flag.setting, value) != value:
            raise ConfigError(
                f"{name} {value} contradicts another flag that sets {flag.setting}; keep one of them"
            )
    return settings, notes


def merge(flags: dict[str, Any], translated: Mapping[str, str]) -> dict[str, Any]:
    """Our own flags and those of the table together; two that contradict each other are refused."""
    for setting, value in translated.items():
        own = flags.get(setting)
        if own is not None and own != value:
            raise ConfigError(f"{setting} is given twice, as {own!r} and as {value!r}; keep one of them")
    return flags | dict(translated)
