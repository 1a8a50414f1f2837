"""Servers that many tests share. They only read from them; tests that change a server start their own."""

import logging
from pathlib import Path

import openai
import pytest

from headlong.server import logs
from support.serving import RunningServer, model_with_template

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor -%}
{{ 'Call one with <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\\n' }}{% endif -%}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


REPEATABLE = {"draft_tokens": 3, "prefix_cache": False}
"""The same figures for the same request: no depth that hangs on a clock, nothing cached by an earlier test."""


@pytest.fixture(scope="session")
def server():
    with RunningServer(**REPEATABLE) as running:
        yield running


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory):
    """The embedded weights behind Qwen3.5's template: tools in the qwen3_coder format, and thinking."""
    template = (TEMPLATES / "Qwen3.5-4B.jinja").read_text()
    folder = model_with_template(tmp_path_factory.mktemp("models") / "tale-tools", template)
    with RunningServer(model=str(folder), **REPEATABLE) as running:
        yield running


@pytest.fixture(scope="session")
def hermes_server(tmp_path_factory):
    folder = model_with_template(tmp_path_factory.mktemp("models") / "tale-hermes", HERMES)
    with RunningServer(model=str(folder), **REPEATABLE) as running:
        yield running


@pytest.fixture
def loggers_as_before():
    """For tests that set logging up."""
    loggers = [logging.getLogger(name) for name in logs.LOGGERS]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def openai_client(running: RunningServer, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, **options)


@pytest.fixture(scope="session")
def client(server):
    return openai_client(server)


@pytest.fixture(scope="session")
def tool_client(tool_server):
    return openai_client(tool_server)


@pytest.fixture(scope="session")
def hermes_client(hermes_server):
    return openai_client(hermes_server)
