"""Prompts for a gap between two texts."""

import pytest

from headlong.checkpoint.source import EMBEDDED
from headlong.errors import RequestError
from headlong.text.infill import WORDS, fill_in
from headlong.text.tokenizer import Tokenizer
from support.vocabularies import with_added_tokens


@pytest.mark.parametrize("words", WORDS)
def test_each_familys_words(tmp_path, words):
    tokenizer = Tokenizer.from_folder(with_added_tokens(tmp_path, words))
    start, hole, end = words
    tokens = fill_in(tokenizer, "Once upon ", " in a wood.")
    assert tokenizer.decode(tokens, skip_special_tokens=False) == f"{start}Once upon {hole} in a wood.{end}"
    assert fill_in(tokenizer, [5, 6], "x")[1:3] == (5, 6)


def test_a_model_without_them():
    tokenizer = Tokenizer.from_folder(EMBEDDED)
    with pytest.raises(RequestError, match=r"suffix: .*fim_prefix"):
        fill_in(tokenizer, "a", "b")
