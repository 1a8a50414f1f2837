"""The tokens an MTP head drafts among: all of them, or some chosen ones, for a shorter lm_head.

The rows of the chosen ones are copied. Logits are theirs alone, one place for each; where a sampler wants to see the
whole vocabulary, all others are as good as impossible. Knows nothing of who chose.
"""

import torch
from torch import Tensor

from headlong.models.embeddings import Embeddings

IMPOSSIBLE = -1e30
"""The logit of tokens that are not drafted. It is above -inf: where a grammar allows none of the chosen tokens, there
must be something left to draft."""


class DraftVocabulary:
    """Turns the head's hidden states into logits of the draft vocabulary, and places in it into tokens."""

    def __init__(self, model: Embeddings, tokens_T: Tensor | None = None) -> None:
        """`tokens_T` are the chosen ones, ascending; without them it is all."""
        self._vocab_size = model.config.vocab_size
        self._lm_head, self.tokens_T = model.lm_head, None
        if tokens_T is not None and len(tokens_T) < self._vocab_size:
            self._lm_head = model.ops.pick(model.lm_head, tokens_T)
            self.tokens_T = tokens_T.to(model.ops.device)
        self._argmax = model.ops.argmax

    def __len__(self) -> int:
        return self._vocab_size if self.tokens_T is None else len(self.tokens_T)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """The logits of the draft vocabulary alone."""
        return self._lm_head(hidden_ND)

    def argmax(self, hidden_ND: Tensor) -> Tensor:
        """The likeliest token, without logits where the lm_head can tell it."""
        return self.tokens(self._lm_head.argmax(hidden_ND, self._argmax))

    def tokens(self, places_N: Tensor) -> Tensor:
        """The tokens at these places of the logits."""
        return places_N if self.tokens_T is None else self.tokens_T[places_N]

    def whole(self, logits_NT: Tensor) -> Tensor:
        """Logits of the whole vocabulary."""
        if self.tokens_T is None:
            return logits_NT
        whole_NV = torch.full(
            (len(logits_NT), self._vocab_size), IMPOSSIBLE, dtype=logits_NT.dtype, device=logits_NT.device
        )
        return whole_NV.index_copy_(1, self.tokens_T, logits_NT)
