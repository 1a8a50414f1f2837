"""Calls written as tags, as Qwen3-Coder and Qwen3.5 do:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

The outer tag may be missing. A value ends at the first `</parameter>`, or at the two tags that end a call where a model
forgets it, without one newline at either end.
"""

from headlong.text.events import WHITE
from headlong.text.tools.rules import CallForm
from headlong.text.tools.scan import MAX_NAME, MAX_SPACE
from headlong.text.tools.tag_rules import TagForm, tagged_rules
from headlong.text.tools.tagged import TaggedScanner

CALL = "<tool_call>"
CALL_END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
_CALL_ENDS = (f"{FUNCTION_END}\n{CALL_END}", f"{FUNCTION_END}{CALL_END}")


class Qwen3CoderScanner(TaggedScanner):
    """Reads the tool calls of one output in the Qwen3-Coder format."""

    markers = (CALL, FUNCTION)
    tails = (FUNCTION_END, CALL_END)
    key_start = PARAMETER
    body_ends = tails
    value_end = PARAMETER_END
    value_ends = _CALL_ENDS
    in_lines = True

    def read_opening(self) -> str | None:
        if self.text.startswith(CALL, self.at):
            self.at += len(CALL)
            if self.skip_space() > MAX_SPACE:
                return None
        tag = self.next_is(FUNCTION)
        return self._tag_name(tag) if tag else tag

    def read_key(self) -> str | None:
        return self._tag_name(PARAMETER)

    def _tag_name(self, tag: str) -> str | None:
        start = self.at + len(tag)
        end = self.text.find(">", start, start + MAX_NAME + 1)
        name = self.text[start : end if end >= 0 else start + MAX_NAME + 1]
        if "<" in name or "\n" in name or len(name) > MAX_NAME:
            return None
        if end < 0:
            return None if self.final else ""
        self.at = end + 1
        return name.strip(WHITE) or None


def _head(parameter: str, _is_text: bool) -> str:
    return f"{PARAMETER}{parameter}>\n"


_TAGS = TagForm(_head, PARAMETER_END, newline="\n", also_ends=_CALL_ENDS, after="\n")
FORM = CallForm(
    tagged_rules(_TAGS, lambda name: f"{FUNCTION}{name}>\n", FUNCTION_END),
    before=f"{CALL}\n",
    after=f"\n{CALL_END}",
    between="\n",
)
