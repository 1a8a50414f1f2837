"""Tinting cuts text by token without ever changing it."""

import random

import pytest

from headlong.checkpoint.source import EMBEDDED
from headlong.cli.drafts import Provenance
from headlong.completion import Chunk
from headlong.text.stream import TextStream
from headlong.text.tokenizer import Tokenizer

TEXT = "A naïve café 🐉🐲, déjà vu: STOP here and there."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(EMBEDDED)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(20))
def test_pieces_join_to_the_text(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    stream = TextStream(tokenizer, ("there was", "never"))
    provenance = Provenance(tokenizer)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)[: rng.randint(1, 60)]
    while tokens:
        count = rng.randint(1, 4)
        group, tokens = tokens[:count], tokens[count:]
        text = "".join(stream.push(token).text for token in group)
        text += "" if tokens else stream.finish()
        drafted = tuple(rng.random() < 0.5 for _ in group)
        pieces = list(provenance.pieces(Chunk(0, text, tuple(group), drafted)))
        assert "".join(piece for piece, _ in pieces) == text
        assert all(piece for piece, _ in pieces)


def test_each_token_keeps_its_origin(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(" once upon a time", add_special_tokens=False)
    drafted = tuple(i % 2 == 0 for i in range(len(tokens)))
    chunk = Chunk(0, tokenizer.decode(tokens), tuple(tokens), drafted)
    expected = [(tokenizer.decode([token]), origin) for token, origin in zip(tokens, drafted, strict=True)]
    assert list(Provenance(tokenizer).pieces(chunk)) == expected
