"""How the byte-level vocabularies of GGUF files split text into words before merging: a table by the name in
`tokenizer.ggml.pre`, read in both directions. Knows nothing of vocabularies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_LLAMA3 = (
    rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"


@dataclass(frozen=True)
class Splitting:
    """`patterns` cut the text one after the other, each inside the pieces that the last one left; what lies between
    two matches is a piece too. `ignore_merges`: a piece that is a token is taken whole. Where a file does not say,
    `add_bos` is whether text gets the first token, and `normalizer` what the models of that name do to it before."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: str = "none"


SPLITTINGS: dict[str, Splitting] = {
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Splitting((_GPT2,)),
    "smollm": Splitting((r"\p{N}", _GPT2)),
    "qwen2": Splitting((_QWEN2,)),
    "qwen35": Splitting((_QWEN35,), normalizer="NFC"),
    "llama-bpe": Splitting((_LLAMA3,), ignore_merges=True, add_bos=True),
    "smaug-bpe": Splitting((_LLAMA3,)),
    "tekken": Splitting((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-llm": Splitting((r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _PUNCTUATION, r"\s+$", _CJK, r"\p{N}")),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": Splitting((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
}
"""The first name of each splitting is the one that is written."""
SPLITTINGS |= {
    alias: SPLITTINGS[name]
    for name, aliases in {
        "gpt-2": ("phi-2", "mpt", "olmo"),
        "smollm": ("starcoder", "refact", "command-r"),
        "qwen2": ("deepseek-r1-qwen", "megrez"),
        "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral"),
        "smaug-bpe": ("dbrx",),
    }.items()
    for alias in aliases
}


def pre_tokenizer(splitting: Splitting) -> dict[str, Any]:
    """The splitting as a tokenizer.json has it."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in splitting.patterns
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, bytes_]}


def recognise(pre_tokenizer: Mapping[str, Any], ignore_merges: bool) -> str | None:
    """The name of the splitting that a tokenizer.json describes; None if it is none of the table."""
    try:
        patterns = _patterns(pre_tokenizer)
    except (KeyError, TypeError, AttributeError):
        return None
    if patterns is None:
        return None
    for name, splitting in SPLITTINGS.items():
        # Files write line ends in a pattern as escapes or as themselves.
        same = tuple(p.replace("\r", r"\r").replace("\n", r"\n") for p in patterns) == splitting.patterns
        if same and splitting.ignore_merges == ignore_merges:
            return name
    return None


def _patterns(pre_tokenizer: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The patterns of a byte-level pre-tokenizer; None for one that does anything else."""
    stages = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    patterns: list[str] = []
    for stage in stages:
        isolates = (stage.get("behavior"), stage.get("invert")) in (("Isolated", False), ("Removed", True))
        if stage["type"] == "Split" and isolates:
            patterns.append(stage["pattern"]["Regex"])
        elif stage["type"] == "Digits":
            patterns.append(r"\p{N}" if stage["individual_digits"] else r"\p{N}+")
        elif stage["type"] == "ByteLevel" and not stage["add_prefix_space"] and stage is stages[-1]:
            patterns.extend([_GPT2] if stage.get("use_regex", True) else [])
        else:
            return None
    return tuple(patterns) if stages[-1]["type"] == "ByteLevel" else None
