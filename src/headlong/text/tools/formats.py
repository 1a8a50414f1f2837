"""The formats in which models write calls: how each is told from a chat template, read, and forced.

A new format is a file beside this one and a row of this table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headlong.text.tools import deepseek, dsml, glm, harmony, hermes, kimi, llama, mistral, qwen3_coder
from headlong.text.tools.rules import CallForm
from headlong.text.tools.scan import CallScanner

Tools = Sequence[Mapping[str, Any]]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolFormat:
    """One format. `signs` are patterns, each of which a template of this format has."""

    signs: tuple[str, ...]
    form: CallForm
    scanner: Callable[[Tools], CallScanner] | None
    """Makes a scanner for a request that has these tools; None where calls are read with the rest of the output."""
    prepare: Callable[[Messages], list[dict[str, Any]]] | None = None
    """Changes a conversation into what the templates of this format can write."""

    def is_told_by(self, template: str) -> bool:
        return all(re.search(sign, template) for sign in self.signs)


FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat((r"<\|channel\|>",), harmony.FORM, None, harmony.with_single_calls),
    "deepseek_v4": ToolFormat(("｜DSML｜", r"(?<!function_)\btool_calls>"), dsml.FORM, dsml.DsmlScanner),
    "deepseek_v32": ToolFormat(("｜DSML｜",), dsml.OLD_FORM, dsml.DsmlScanner),
    "deepseek_v3": ToolFormat(
        ("<｜tool▁calls▁begin｜>", "```json"), deepseek.V3_FORM, lambda _: deepseek.DeepseekScanner()
    ),
    "deepseek_v31": ToolFormat(
        ("<｜tool▁calls▁begin｜>",), deepseek.V31_FORM, lambda _: deepseek.DeepseekScanner()
    ),
    "kimi_k2": ToolFormat(
        (r"<\|tool_calls_section_begin\|>|tool_declare<\|im_middle\|>",),
        kimi.FORM,
        lambda _: kimi.KimiScanner(),
        kimi.with_kimi_ids,
    ),
    "mistral_args": ToolFormat(
        (r"\[TOOL_CALLS\]", r"\[ARGS\]"),
        mistral.ARGUMENTS_FORM,
        lambda _: mistral.MistralScanner(),
        mistral.with_short_ids,
    ),
    "mistral": ToolFormat(
        (r"\[TOOL_CALLS\]",), mistral.LIST_FORM, lambda _: mistral.MistralScanner(), mistral.with_short_ids
    ),
    "qwen3_coder": ToolFormat(("<function=",), qwen3_coder.FORM, qwen3_coder.Qwen3CoderScanner),
    "glm47": ToolFormat(("<tool_call>", "</arg_key><arg_value>"), glm.CLOSE_FORM, glm.GlmScanner),
    "glm45": ToolFormat(("<tool_call>", "<arg_key>"), glm.LINES_FORM, glm.GlmScanner),
    # How instructions inside a template show the JSON of a call, within either kind of quotes.
    "hermes": ToolFormat(
        ("<tool_call>", r'\\?"arguments\\?"'), hermes.FORM, lambda _: hermes.HermesScanner()
    ),
    "llama3_json": ToolFormat(
        (r"<\|start_header_id\|>", r'\\?"parameters\\?":'), llama.FORM, llama.LlamaScanner
    ),
}
"""The formats by name. A template is of the first one whose signs it has."""


def format_of(template: str) -> str | None:
    """The name of the format that a template is written for; None if it shows no calls."""
    return next((name for name, format in FORMATS.items() if format.is_told_by(template)), None)
