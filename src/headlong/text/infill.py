"""Prompts for a gap between two texts, in the words of the families that were trained to fill one. Knows no model."""

from collections.abc import Sequence

from headlong.errors import RequestError
from headlong.text.tokenizer import Tokenizer

WORDS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""What stands before the text before the gap, before the text after it, and before what fills it."""


def fill_in(
    tokenizer: Tokenizer, before: str | Sequence[int], after: str, *, most: int | None = None
) -> tuple[int, ...]:
    """The prompt that asks for what stands between two texts, of at most `most` tokens each. Raises `RequestError` if
    the model knows no such prompt."""
    found = next(
        (words for words in WORDS if all(tokenizer.token_id(word) is not None for word in words)), None
    )
    if found is None:
        raise RequestError(
            "suffix: this model was not trained to fill gaps (it has no tokens such as <|fim_prefix|>); "
            "leave it out, or put both texts into a chat message"
        )
    start, hole, end = (tokenizer.token_id(word) for word in found)
    assert start is not None and hole is not None and end is not None
    prefix = tokenizer.encode(before, False, most=most) if isinstance(before, str) else before
    return (start, *prefix, hole, *tokenizer.encode(after, False, most=most), end)
