"""The embedded model in each dtype, loaded once."""

import pytest
from engine_cases import load

from headlong import LLM


@pytest.fixture(scope="session")
def llms() -> dict[str, LLM]:
    return {}


@pytest.fixture(params=["bfloat16", "float32", "float64"])
def dtype(request) -> str:
    return request.param


@pytest.fixture
def llm_of_dtype(dtype, llms) -> LLM:
    """16 rows, up to 8 drafts."""
    if dtype not in llms:
        llms[dtype] = load(dtype, max_rows=16, max_draft_tokens=8)
    return llms[dtype]


@pytest.fixture
def llm(llms) -> LLM:
    """The default: bfloat16 where the CPU multiplies it, else float32."""
    if "auto" not in llms:
        llms["auto"] = load("auto", max_rows=16)
    return llms["auto"]
