"""Reasoning split from the answer: against a plain search over the whole text, however it is cut."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_samples import cut, places, shuffled

from headlong.text.reasoning import THINK, ReasoningSplitter

WHITE = " \t\r\n"
FRAGMENTS = [
    "<think>",
    "</think>",
    "<thi",
    "nk>",
    "</",
    "think",
    ">",
    "<",
    "/",
    " ",
    "\n",
    "\t",
    "a",
    "b c",
    "é",
]


def split(text: str, inside: bool) -> tuple[str, str]:
    """The oracle: (reasoning, answer) of a complete text."""
    if not inside:
        if not text.lstrip(WHITE).startswith("<think>"):
            return "", text
        text = text.lstrip(WHITE).removeprefix("<think>")
    reasoning, closed, answer = text.partition("</think>")
    if not closed:
        core = reasoning.lstrip(WHITE)
        return core, ""
    return reasoning.strip(WHITE), answer.lstrip(WHITE)


def read(pieces: list[str], inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(THINK, inside)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
    assert all(part.text for part in parts)
    kinds = [part.is_reasoning for part in parts]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first"
    return (
        "".join(part.text for part in parts if part.is_reasoning),
        "".join(part.text for part in parts if not part.is_reasoning),
    )


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("\nI think.\n\nSo.\n</think>\n\nYes.\n", True, ("I think.\n\nSo.", "Yes.\n")),
        ("\n<think>\nHm\n</think>\n\nYes", False, ("Hm", "Yes")),
        ("Yes <think>no</think>", False, ("", "Yes <think>no</think>")),
        (" plain ", False, ("", " plain ")),
        ("cut off \n", True, ("cut off \n", "")),
        ("<think>\n\n</think>\n\nfast", False, ("", "fast")),
        ("a</thin", True, ("a</thin", "")),
        ("<thin", False, ("", "<thin")),
        ("a</think>b</think>c<think>", True, ("a", "b</think>c<think>")),
        ("", True, ("", "")),
        ("<think> \n", False, ("", "")),
        ("\u3000x\u3000</think>\u00a0y", True, ("\u3000x\u3000", "\u00a0y")),
    ],
)
def test_examples(text, inside, expected):
    assert split(text, inside) == expected
    assert read([text], inside) == expected
    assert read(list(text), inside) == expected


@settings(max_examples=400, deadline=None)
@given(text=shuffled(FRAGMENTS), inside=st.booleans(), places=places)
def test_any_cut_agrees_with_the_oracle(text, inside, places):
    assert read(cut(text, places), inside) == split(text, inside)


@given(text=st.text(alphabet="<think>/ \na", max_size=60), inside=st.booleans())
def test_nothing_is_held_that_cannot_be_a_marker(text, inside):
    """Whatever is not yet given out is the beginning of a marker, or white space before one."""
    splitter = ReasoningSplitter(THINK, inside)
    given_len = sum(len(part.text) for part in splitter.push(text))
    reasoning, answer = split(text, inside)
    held = (reasoning + answer)[given_len:]
    assert "</think>".startswith(held.lstrip(WHITE)) or "<think>".startswith(held.lstrip(WHITE))


def test_prompts():
    assert THINK.opened_by("<|im_start|>assistant\n<think>\n")
    assert not THINK.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not THINK.opened_by("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "text", [" " * 100_000, "</think" * 14_000, "<think>" + "\n" * 100_000, "x \n" * 33_000]
)
def test_time_grows_with_the_length_alone(text):
    for pieces in ([text], list(text)):
        start = time.process_time()
        read(pieces, inside=True)
        assert time.process_time() - start < 2
