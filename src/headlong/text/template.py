"""Turns chat messages into one prompt string, by the Jinja template that comes with a checkpoint.

The template is a program from a stranger and the messages are data from another, so it runs in
a sandbox that bounds what it makes and how long it takes. Knows no tokenizer and no HTTP: content
is passed through as it came, and what to make of it is the template's affair.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.meta import find_undeclared_variables

from headlong.errors import RequestError
from headlong.small_files import read_text
from headlong.text.bounds import BUDGET, MAX_VALUE_CHARS, Budget
from headlong.text.sandbox import Refusal, Sandbox

MAX_SOURCE_CHARS = 64 << 10
MAX_OUTPUT_CHARS = MAX_VALUE_CHARS
MAX_STEPS = 4_000_000
"""The most steps of one rendering: loop turns, calls, filters and the like."""
MAX_SECONDS = 0.7
SECONDS_PER_MESSAGE = 0.0003  # several times what the longest templates take for one
MAX_SECONDS_IN_ALL = 3.0
"""The most processor time of one rendering. A busy machine thus refuses nothing that a quiet one accepts."""
_MAX_REASON_CHARS = 500  # of a template's own words in an error

# The reasoning of a message travels under several names; templates read the first or the second.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled template. Rendering keeps no state here, so threads may share an instance."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """`special_tokens` (bos_token, eos_token, ...) become variables of the template."""
        self._special_tokens = dict(special_tokens or {})
        if len(source) > MAX_SOURCE_CHARS:
            raise RequestError(f"chat_template: is longer than {MAX_SOURCE_CHARS} characters; shorten it")
        self.source = source
        try:
            self._template = Sandbox().from_string(source)
        except RequestError:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"chat_template: line {error.lineno} is not valid Jinja ({error.message}); fix the template"
            ) from error
        except Exception as error:  # a stray `break`, a nesting too deep: Python's compiler objects
            raise RequestError(f"chat_template: cannot be compiled ({error}); fix the template") from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template looks up when it runs, some of which it may set itself."""
        return frozenset(find_undeclared_variables(Sandbox().parse(self.source)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for `messages`; `extra` are further variables (enable_thinking, documents, ...)."""
        check_messages(messages)
        _check_tools(tools)
        variables = {
            "documents": None,
            **self._special_tokens,
            **extra,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        seconds = min(MAX_SECONDS + SECONDS_PER_MESSAGE * len(messages), MAX_SECONDS_IN_ALL)
        spending = BUDGET.set(Budget(MAX_STEPS, seconds))
        try:
            return self._bounded(variables)
        except RequestError:
            raise
        except Refusal as error:
            raise RequestError(
                f"messages: the chat template refuses them: {_short(error.message)}"
            ) from error
        except jinja2.UndefinedError as error:
            raise RequestError(
                f"messages: the chat template needs a value that is missing: {_short(error.message)}"
            ) from error
        except SecurityError as error:
            raise RequestError(f"chat_template: does something unsafe: {_short(error.message)}") from error
        except Exception as error:  # a template can raise whatever Python can: TypeError, KeyError, ...
            raise RequestError(
                f"messages: the chat template failed on them ({type(error).__name__}: {_short(error)}); "
                "check that each content has the form this model expects"
            ) from error
        finally:
            BUDGET.reset(spending)

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


def read_template(wanted: str) -> str:
    """The template in a file, or the text itself where it is one."""
    if "{" in wanted:
        return wanted
    try:
        return read_text(Path(wanted).expanduser(), 4 * MAX_SOURCE_CHARS)
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise RequestError(
            f"chat_template: {wanted!r} cannot be read ({reason}); give a Jinja file"
        ) from error


def read_variables(source: str) -> frozenset[str]:
    """The names that a template looks up when it runs; none for a text that is no template."""
    try:
        return ChatTemplate(source).variables
    except RequestError:
        return frozenset()


def _short(reason: Any) -> str:
    return str(reason)[:_MAX_REASON_CHARS]


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy where the reasoning, under whichever name it came, has the names that templates read."""
    found = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


def check_messages(messages: Any) -> None:
    """Refuse what no template could make a prompt of."""
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
