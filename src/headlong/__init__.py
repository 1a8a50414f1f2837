"""Headlong: exact multi-token-prediction inference. The head drafts, the target decides.

from headlong import LLM, SamplingParams
print(LLM().generate("Once upon a time", SamplingParams(max_tokens=64)).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headlong.version import __version__ as __version__

if TYPE_CHECKING:
    from headlong.async_llm import AsyncLLM
    from headlong.completion import Chunk, Completion, MtpStatus, Stats
    from headlong.errors import (
        CheckpointError,
        ConfigError,
        HeadError,
        HeadlongError,
        RequestError,
    )
    from headlong.llm import LLM
    from headlong.params import Grammar, SamplingParams
    from headlong.types import TokenLogprobs

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "Chunk",
    "Completion",
    "ConfigError",
    "Grammar",
    "HeadError",
    "HeadlongError",
    "MtpStatus",
    "RequestError",
    "SamplingParams",
    "Stats",
    "TokenLogprobs",
]

_HOMES = {
    "async_llm": ("AsyncLLM",),
    "completion": ("Chunk", "Completion", "MtpStatus", "Stats"),
    "llm": ("LLM",),
    "params": ("Grammar", "SamplingParams"),
    "types": ("TokenLogprobs",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: torch takes seconds, and `headlong --help` needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
