"""Calls between DeepSeek's special tokens, each with a name and its arguments as JSON.

V3 and R1 write `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, then the arguments in a fence, V3.1 writes
`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}`. One scanner reads both; either may lack the tokens around all calls.
"""

from headlong.text.tools.headed_calls import HeadedScanner
from headlong.text.tools.rules import CallForm, headed_rules, literal

CALLS = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKUP = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)
_FENCE = "```json"
_FENCE_END = "```"


class DeepseekScanner(HeadedScanner):
    """Reads the tool calls of one output in either of the two formats."""

    markers = (CALLS, CALL)
    tails = (_FENCE_END, CALL_END, CALLS_END)
    empty_ends = (CALL_END,)

    def read_head(self) -> str | None:
        tag = self.step_into(CALL, CALLS)
        if not tag:
            return tag
        first = self.up_to(SEPARATOR)
        if first != "function":
            return first
        self.skip_space()
        if self.at == len(self.text) and not self.final:
            return ""
        if self.text.startswith("{", self.at) or self.text.startswith(CALL_END, self.at):
            return first  # a tool of that name
        name = self.up_to(_FENCE_END)
        if not name:
            return name
        self.at -= len(_FENCE_END)
        fence = self.next_is(_FENCE)
        if not fence:
            return fence
        self.at += len(fence)
        return name


def _fenced_head(name: str) -> str:
    return literal(f"function{SEPARATOR}{name}\n{_FENCE}\n")


def _plain_head(name: str) -> str:
    return literal(f"{name}{SEPARATOR}")


V3_FORM = CallForm(
    headed_rules(_fenced_head),
    before=CALL,
    after=f"\n{_FENCE_END}{CALL_END}",
    opening=CALLS,
    closing=CALLS_END,
    between="\n",
)
V31_FORM = CallForm(headed_rules(_plain_head), before=CALL, after=CALL_END, opening=CALLS, closing=CALLS_END)
