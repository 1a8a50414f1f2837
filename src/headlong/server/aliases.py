"""Other servers' names for our settings: vLLM's `speculative_config`, tabbyAPI's sections and load options.

Translates names; values are checked where the settings are.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from headlong.errors import ConfigError

TABBY_SECTIONS: dict[str, dict[str, str]] = {
    "network": {"host": "host", "port": "port"},
    "model": {
        "model_name": "model",
        "model_dir": "model_dir",
        "inline_model_loading": "inline_loading",
        "max_seq_len": "max_context",
    },
}
DRAFTING = {
    "speculative_config": ("method", "num_speculative_tokens"),
    "draft_model": ("draft_mode", "draft_num_tokens"),
}
"""The fields of each section of a request that say what drafts, and how deep."""
MAX_LISTED = 10


def drafting(section: str, content: Any, origin: str) -> dict[str, Any]:
    """Translates the drafting options of vLLM or tabbyAPI into `mtp` and `draft_tokens`. A client that names a method
    insists on it."""
    method_key, depth_key = DRAFTING[section]
    if not isinstance(content, Mapping):
        raise ConfigError(f"{origin} must be a mapping with {method_key} and {depth_key}")
    for key in content:
        if key not in (method_key, depth_key):
            raise ConfigError(f"{origin}: {unknown(key, (method_key, depth_key))}")
    given = {}
    method = content.get(method_key)
    if method is not None:
        if not isinstance(method, str) or not (method == "mtp" or method.endswith("_mtp")):
            raise ConfigError(
                f"{origin}: {method_key} must be mtp, which is what Headlong drafts with, not {method!r}; "
                "mtp: off turns drafting off"
            )
        given["mtp"] = "on"
    if content.get(depth_key) is not None:
        depth = content[depth_key]
        if isinstance(depth, bool) or not isinstance(depth, int):
            raise ConfigError(f"{origin}: {depth_key} must be a whole number, not {depth!r}")
        given["draft_tokens"] = depth
    return given


def unknown(key: Any, known: Iterable[str]) -> str:
    """Returns the sentence `there is no …`, with the likeliest spelling."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(key).lower().replace("-", "_"), names, n=1)
    if near:
        hint = f"did you mean {names[near[0]]}?"
    elif len(names) <= MAX_LISTED:
        hint = f"known are {', '.join(names.values())}"
    else:
        hint = "`headlong serve --help` lists all"
    return f"there is no {str(key)[:80]!r}; {hint}"
