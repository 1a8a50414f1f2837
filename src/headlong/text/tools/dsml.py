"""Calls in DeepSeek's markup, as V3.2 and V4 write them:

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">value</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

V3.2 names the outermost tag `function_calls`; one scanner reads both, and calls without it. A parameter says itself
whether it is a string, which stands there bare, or JSON.
"""

from headlong.text.tools.rules import CallForm
from headlong.text.tools.scan import MAX_SPACE
from headlong.text.tools.tag_rules import TagForm, tagged_rules
from headlong.text.tools.tagged import TaggedScanner

SIGN = "｜DSML｜"
CALLS = f"<{SIGN}tool_calls>"
CALLS_END = f"</{SIGN}tool_calls>"
OLD_CALLS = f"<{SIGN}function_calls>"
OLD_CALLS_END = f"</{SIGN}function_calls>"
CALL = f'<{SIGN}invoke name="'
CALL_END = f"</{SIGN}invoke>"
PARAMETER = f'<{SIGN}parameter name="'
PARAMETER_END = f"</{SIGN}parameter>"
MARKUP = (SIGN, CALLS, CALLS_END, OLD_CALLS, OLD_CALLS_END, CALL_END, PARAMETER_END)
_FLAGS = ('string="true">', 'string="false">')


class DsmlScanner(TaggedScanner):
    """Reads the tool calls of one output in DeepSeek's markup."""

    markers = (CALLS, OLD_CALLS, CALL)
    tails = (CALL_END, CALLS_END, OLD_CALLS_END)
    key_start = PARAMETER
    body_ends = (CALL_END,)
    value_end = PARAMETER_END

    def read_opening(self) -> str | None:
        tag = self.step_into(CALL, CALLS, OLD_CALLS)
        return tag and self.up_to('">')

    def read_key(self) -> str | None:
        self.at += len(PARAMETER)
        key = self.up_to('"')
        if not key:
            return key
        if self.skip_space() > MAX_SPACE:
            return None
        flag = self.next_is(*_FLAGS)
        if not flag:
            return flag
        self.at += len(flag)
        self.is_text = flag == _FLAGS[0]
        return key


def _head(parameter: str, is_text: bool) -> str:
    return f'{PARAMETER}{parameter}" string="{"true" if is_text else "false"}">'


_WRITE = tagged_rules(
    TagForm(_head, PARAMETER_END, after="\n", tells_text=True, forbidden='<>\n"'),
    lambda name: f'{CALL}{name}">\n',
    f"{CALL_END}\n",
)
FORM = CallForm(_WRITE, opening=f"{CALLS}\n", closing=CALLS_END)
OLD_FORM = CallForm(_WRITE, opening=f"{OLD_CALLS}\n", closing=OLD_CALLS_END)
