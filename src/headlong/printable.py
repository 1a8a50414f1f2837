"""Text from outside made harmless for a terminal or a log: whatever could move a cursor, end a line, change a colour
or turn the direction of reading is written as an escape. The one function for it; knows no stream.
"""

import re

_CONTROLS = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What text that people read may not hold: C0 and C1, ends of lines that are no newline, marks that turn the direction
or hide, halves of characters. What scripts need to be written, such as joiners and wide spaces, is not among them."""


def printable(text: str, keep: str = "") -> str:
    """The text with everything unprintable escaped, but for the characters to keep. For names and sentences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def printable_answer(text: str) -> str:
    """What a model wrote, for a terminal: newlines and tabs stay, and so does what scripts need."""
    return _CONTROLS.sub(lambda match: c if (c := match[0]) in "\n\t" else _escape(c), text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
