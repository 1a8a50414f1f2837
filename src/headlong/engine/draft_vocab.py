"""Which tokens the head drafts among, from what the config says and what was counted."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor

from headlong.speculate import frequencies
from headlong.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def draft_tokens(
    wanted: int | str | Path | None, vocab_size: int, tokenizer: Tokenizer | None, stop_ids: Collection[int]
) -> Tensor | None:
    """Token ids, ascending; None for all. A number takes the most frequent by the counts stored for this tokenizer, or
    without counts the first ones; a file is taken whole. Tokens that end or structure an answer are always in."""
    if wanted is None:
        return None
    always = {*stop_ids, *(() if tokenizer is None else tokenizer.structural_ids)}
    if isinstance(wanted, int):
        if wanted >= vocab_size:
            return None
        counts = None if tokenizer is None else frequencies.load(tokenizer.fingerprint)
        found = frequencies.most_frequent(counts or {}, wanted, vocab_size, always)
        how = (
            "the first ones; `headlong tune --draft-vocab` counts" if counts is None else "the most frequent"
        )
    else:
        listed = {*frequencies.read_list(wanted, vocab_size), *always}
        found = torch.tensor(sorted(token for token in listed if 0 <= token < vocab_size))
        how = f"those of {wanted}"
    log.info("drafting among %d of %d tokens, %s", len(found), vocab_size, how)
    return found


def count_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[int]:
    """How often each token is in these texts."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer.encode(text, add_special_tokens=False))
    return counts
