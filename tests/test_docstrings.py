"""Docstrings are sentences that a reader understands alone.

A docstring that begins with a preposition or a pronoun continues a sentence that only its author has in mind, and a
lone word says no more than the name it explains. Docstrings of attributes (a string after an assignment) count, too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "headlong"

PACKAGES = ("", *sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()))
"""Packages that are held to this, with all that is below them; the empty name is the modules beside the packages."""

FRAGMENT = re.compile(
    r"(Of|That|Whose|Its|It|They|These|Those|Them|Such|Else|Instead|And|But|Or|So|Not|"
    r"To|By|From|Into|Up|Past|Beyond|Below|Above|Until|As|Also)\b"
)
"""First words of what is a part of a sentence."""

POINTER = re.compile(r"(^|[.:;] )(the same|same|ditto)\.|\b(as ever|as above|see above)\b", re.IGNORECASE)
"""References to something the reader cannot see."""

END = re.compile(r'[.:!?)"`\]]$')


def riddle(text: str) -> str | None:
    """Why a docstring cannot be understood alone; None if it may be."""
    text = text.strip()
    words = re.findall(r"[^\W\d_]{2,}", text)
    if FRAGMENT.match(text):
        return "begins in the middle of a sentence"
    if POINTER.search(text):
        return "points at something that is not there"
    if len(words) < 2:
        return "is less than a sentence"
    if "\n\n" not in text and not END.search(text):
        return "does not end as a sentence does"
    return None


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and text of every string that stands as a statement: modules', classes', functions', attributes'."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)  # an expression, in a lambda
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def files(package: str) -> list[Path]:
    return sorted(SOURCE.glob("*.py") if not package else (SOURCE / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package or "top level")
def test_docstrings_are_understood_alone(package):
    found, read = [], 0
    for path in files(package):
        for line, text in docstrings(ast.parse(path.read_text("utf-8"))):
            read += 1
            if reason := riddle(text):
                found.append(f"{path.relative_to(SOURCE)}:{line} {reason}: {text.strip()[:60]!r}")
    assert read > 5, "the docstrings were not found"
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    ["Of a step.", "The same.", "As above.", "That a row has, at most.", "Longest.", "Its pages, in order.",
     "What a row has, as ever.", "How many rows there are"],
)  # fmt: skip
def test_riddles_are_refused(text):
    assert riddle(text)


@pytest.mark.parametrize(
    "text",
    ["The most tokens of one step.", "Whether drafts are made.", "Returns silu(gate) · up.",
     "A title\n\n    formula = x", "`other` is read, not changed."],
)  # fmt: skip
def test_sentences_are_not(text):
    assert riddle(text) is None
