"""Headlong: exact multi-token-prediction inference. The head drafts, the target decides.

from headlong import LLM, SamplingParams
print(LLM().generate("Once upon a time", SamplingParams(max_tokens=64)).text)
"""

from headlong.async_llm import AsyncLLM
from headlong.completion import Chunk, Completion, MtpStatus, Stats
from headlong.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    HeadError,
    HeadlongError,
    RequestError,
)
from headlong.llm import LLM
from headlong.params import SamplingParams
from headlong.types import TokenLogprobs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CheckpointError",
    "Chunk",
    "Completion",
    "ConfigError",
    "HeadError",
    "HeadlongError",
    "MtpStatus",
    "RequestError",
    "SamplingParams",
    "Stats",
    "TokenLogprobs",
]
