"""Tokenizers made from the embedded model's."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from headlong.checkpoint.source import EMBEDDED


def with_added_tokens(folder: Path, words: Sequence[str]) -> Path:
    """A folder with the embedded tokenizer and some special tokens more."""
    shutil.copy(EMBEDDED / "tokenizer_config.json", folder)
    content = json.loads((EMBEDDED / "tokenizer.json").read_text())
    size = len(content["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    content["added_tokens"] += [{"id": size + n, "content": word} | flags for n, word in enumerate(words)]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
