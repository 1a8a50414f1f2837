"""An output as blocks in order, and which tokens are whose. Real parsers, the embedded tokenizer."""

import re
from pathlib import Path

import pytest

from headlong.checkpoint.source import EMBEDDED
from headlong.server.blocks import Blocks, cut_off
from headlong.server.logprobs import TextLogprobs
from headlong.text.output import ChatFormat
from headlong.text.reasoning import THINK
from headlong.text.tokenizer import Tokenizer
from headlong.types import TokenLogprobs

FORMAT = ChatFormat(THINK, "hermes")
TOOLS = [{"type": "function", "function": {"name": "go"}}]
CALL = '<tool_call>\n{"name": "go", "arguments": {"to": "Rome"}}\n</tool_call>'
OUTPUTS = {
    "plain": ("I like <b>bold</b> dragons – ä 🐉.", [("text", "I like <b>bold</b> dragons – ä 🐉.")]),
    "thought": ("<think>\nHm, 1 < 2.\n</think>\n\nYes.", [("reasoning", "Hm, 1 < 2."), ("text", "Yes.")]),
    "all": (
        f"<think>Hm.</think>\nLet me look.\n{CALL}\n{CALL}\nThat was it.",
        [
            ("reasoning", "Hm."),
            ("text", "Let me look."),
            ("call", '{"to": "Rome"}'),
            ("call", '{"to": "Rome"}'),
            ("text", "\nThat was it."),
        ],
    ),
    "call": (CALL, [("call", '{"to": "Rome"}')]),
    "nothing": ("", []),
}
each_output = pytest.mark.parametrize(("text", "expected"), OUTPUTS.values(), ids=OUTPUTS)


def read(text, size):
    """Blocks of a text that comes in pieces of that size, and every change on the way."""
    parser, blocks = FORMAT.parser("", TOOLS), Blocks()
    changes = []
    for start in range(0, len(text), size):
        changes += blocks.take(parser.push(text[start : start + size]))
    changes += blocks.take(parser.finish())
    return blocks, changes + blocks.close()


@each_output
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks_in_order(text, expected, size):
    blocks, changes = read(text, size)
    assert [(block.type, block.text) for block in blocks] == expected
    assert [block.index for block in blocks] == list(range(len(expected)))
    seen = {}
    for what, block, more in changes:
        if what == "opened":
            assert block.index == len(seen)
            seen[block.index] = ""
        elif what == "grew":
            assert block.index == len(seen) - 1, "only the last one grows"
            seen[block.index] += more
    assert list(seen.values()) == [text for _, text in expected]
    assert [block.index for what, block, _ in changes if what == "closed"] == list(range(len(expected)))


def test_where_the_limit_fell():
    blocks, _ = read("Well. " + CALL, 1)
    assert [cut_off(block, blocks, "length") for block in blocks] == [False, False]
    blocks, _ = read("Well. " + CALL.partition("Ro")[0], 1)
    assert [cut_off(block, blocks, "length") for block in blocks] == [False, True]
    assert [cut_off(block, blocks, "stop") for block in blocks] == [False, False]
    blocks, _ = read("Well", 1)
    assert [cut_off(block, blocks, "length") for block in blocks] == [True]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(Path(EMBEDDED))


def spelled_out(tokenizer, text):
    """Tokens of a text whose markup has no token of its own."""
    pieces = [piece for piece in re.split("(<)", text) if piece]
    return [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]


@each_output
@pytest.mark.parametrize("size", [1, 5])
def test_tokens_of_a_text(tokenizer, text, expected, size):
    """Joined, a block's tokens are its text, but for white space that a token has on its edge."""
    tokens = [TokenLogprobs(token, -1.0) for token in spelled_out(tokenizer, text)]
    logprobs = TextLogprobs(tokenizer, FORMAT.parser("", TOOLS))
    told = {index: [] for index in range(len(expected))}
    for start in range(0, len(tokens), size):
        logprobs.push(tokens[start : start + size])
        for index, more in told.items():
            more += logprobs.more(index)
    logprobs.finish()
    for index, (kind, content) in enumerate(expected):
        shown = logprobs.all(index)
        joined = b"".join(bytes(one["bytes"]) for one in shown).decode()
        assert joined.strip() == (content.strip() if kind == "text" else "")
        assert told[index] + logprobs.more(index) == shown
