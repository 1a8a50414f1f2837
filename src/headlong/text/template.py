"""Chat messages -> one prompt string, by the Jinja template that comes with a checkpoint.

The template is a program from a stranger and the messages are data from another, so it runs in
Jinja's immutable sandbox with its output, loops and arithmetic bounded. Knows no tokenizer and
no HTTP: content is passed through as it came, and what to make of it is the template's affair.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headlong.errors import RequestError

MAX_OUTPUT_CHARS = 8 << 20
MAX_STEPS = 4_000_000  # loop turns and macro calls in one rendering
MAX_POWER_BITS = 4096

# The reasoning of a message travels under several names; templates read the first or the second.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_STEP_HOOK = "headlong_step"


class _Refusal(jinja2.TemplateError):
    """What `raise_exception` raises: the template itself says no."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which already bounds `range()`, plus bounds on `*`, `**` and on steps."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            bits = left.bit_length() if isinstance(left, int) else 64
            if isinstance(right, int) and bits * abs(right) > MAX_POWER_BITS:
                raise OverflowError("a power is too large")
        else:
            for sized, count in ((left, right), (right, left)):
                repeats = isinstance(sized, str | list | tuple) and isinstance(count, int)
                if repeats and len(sized) * count > MAX_OUTPUT_CHARS:
                    raise OverflowError("a repeated string or list is too long")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Begin every loop and macro body with a call that counts it: nested ranges and macros that
        call themselves twice print nothing and still never end."""
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            hook = nodes.Call(nodes.Name(_STEP_HOOK, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(hook).set_lineno(node.lineno))
        return tree


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML, which no model was shown."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. Rendering keeps no state here, so threads may share an instance."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """`special_tokens` (bos_token, eos_token, ...) become variables of the template."""
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"chat_template: line {error.lineno} is not valid Jinja ({error.message}); fix the template"
            ) from error
        except Exception as error:  # a stray `break`, a nesting too deep: Python's compiler objects
            raise RequestError(f"chat_template: cannot be compiled ({error}); fix the template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for `messages`; `extra` are further variables (enable_thinking, documents, ...)."""
        _check_messages(messages)
        _check_tools(tools)
        variables = {
            "documents": None,
            **self._special_tokens,
            **extra,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            _STEP_HOOK: _step_counter(),
        }
        try:
            return self._bounded(variables)
        except RequestError:
            raise
        except _Refusal as error:
            raise RequestError(f"messages: the chat template refuses them: {error.message}") from error
        except jinja2.UndefinedError as error:
            raise RequestError(
                f"messages: the chat template needs a value that is missing: {error.message}"
            ) from error
        except SecurityError as error:
            raise RequestError(f"chat_template: does something unsafe: {error.message}") from error
        except Exception as error:  # a template can raise whatever Python can: TypeError, KeyError, ...
            raise RequestError(
                f"messages: the chat template failed on them ({type(error).__name__}: {error}); "
                "check that each content has the form this model expects"
            ) from error

    def _bounded(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(variables):
            length += len(piece)
            if length > MAX_OUTPUT_CHARS:
                raise RequestError(
                    f"messages: the chat template writes over {MAX_OUTPUT_CHARS} characters; send less text"
                )
            pieces.append(piece)
        return "".join(pieces)


def _step_counter() -> Any:
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            raise RequestError(f"chat_template: more than {MAX_STEPS} loop steps; send fewer messages")

    return step


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy where the reasoning, under whichever name it came, has the names that templates read."""
    found = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list | tuple):
        raise RequestError("messages: must be a list of {role, content} objects")
    if not messages:
        raise RequestError("messages: must hold at least one message")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where}: must be an object with `role` and `content`")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"{where}.role: must be a non-empty string such as 'user' or 'assistant'")
        content = message.get("content")
        if isinstance(content, list | tuple):
            for number, part in enumerate(content):
                if not isinstance(part, Mapping):
                    raise RequestError(f"{where}.content[{number}]: must be an object with a `type`")
        elif content is None:
            # An assistant that only calls tools has nothing to say, and the usual clients send null.
            if not (role == "assistant" and message.get("tool_calls")):
                raise RequestError(f"{where}.content: is missing; give a string (an empty one is allowed)")
        elif not isinstance(content, str):
            raise RequestError(f"{where}.content: must be a string or a list of parts")


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list | tuple):
        raise RequestError("tools: must be a list of JSON objects")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{index}]: must be a JSON object describing one function")
