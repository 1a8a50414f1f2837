"""Calls written as pairs of tags, as GLM-4.5 and later do:

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

GLM-4.7 leaves the newlines out; one scanner reads both. A value is taken as it stands between its tags.
"""

import re

from headlong.text.tools.rules import CallForm
from headlong.text.tools.scan import MAX_NAME, MAX_SPACE
from headlong.text.tools.tag_rules import TagForm, tagged_rules
from headlong.text.tools.tagged import TaggedScanner

CALL = "<tool_call>"
CALL_END = "</tool_call>"
KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
MARKUP = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
_NAME = re.compile(r"""[^\s<>{}"]{1,256}""")


class GlmScanner(TaggedScanner):
    """Reads the tool calls of one output in the GLM format."""

    markers = (CALL,)
    tails = (CALL_END,)
    key_start = KEY
    body_ends = (CALL_END,)
    value_end = VALUE_END

    def read_opening(self) -> str | None:
        self.at += len(CALL)
        if self.skip_space() > MAX_SPACE:
            return None
        found = _NAME.match(self.text, self.at)
        if found is None:
            return "" if self.at == len(self.text) and not self.final else None
        self.at = found.end()
        near = self.skip_space() <= MAX_SPACE
        following = self.next_is(KEY, CALL_END) if near else None
        return found.group() if following else following

    def read_key(self) -> str | None:
        self.at += len(KEY)
        key = self._key_text()
        if not key:
            return key
        if self.skip_space() > MAX_SPACE:
            return None
        tag = self.next_is(VALUE)
        if not tag:
            return tag
        self.at += len(tag)
        return key

    def _key_text(self) -> str | None:
        """The text of a key, which may hold anything but its own closing tag."""
        end = self.text.find(KEY_END, self.at, self.at + MAX_NAME + len(KEY_END))
        if end < 0:
            return None if self.final or len(self.text) - self.at >= MAX_NAME + len(KEY_END) else ""
        key, self.at = self.text[self.at : end], end + len(KEY_END)
        return key or None


def _head(parameter: str, _is_text: bool) -> str:
    return f"{KEY}{parameter}{KEY_END}\n{VALUE}"


def _close_head(parameter: str, _is_text: bool) -> str:
    return f"{KEY}{parameter}{KEY_END}{VALUE}"


LINES_FORM = CallForm(
    tagged_rules(TagForm(_head, VALUE_END, after="\n"), lambda name: f"{name}\n"),
    before=CALL,
    after=CALL_END,
    between="\n",
)
CLOSE_FORM = CallForm(
    tagged_rules(TagForm(_close_head, VALUE_END), lambda name: name), before=CALL, after=CALL_END
)
