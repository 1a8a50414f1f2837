"""The embedded model's tokenizer, read once."""

import pytest
from text_samples import MODEL

from headlong.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tale() -> Tokenizer:
    tokenizer = Tokenizer.from_folder(MODEL)
    assert tokenizer is not None
    return tokenizer
