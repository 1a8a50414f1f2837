"""What one step did to one choice, token by token, for those who asked to see it."""

from typing import Any

from headlong.server.generation import Piece
from headlong.text.stream import Detokenizer
from headlong.text.tokenizer import Tokenizer


class Tracer:
    """Token texts joined are the whole text: a character spread over tokens is shown with its last one."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, Detokenizer] = {}

    def step(self, piece: Piece) -> dict[str, Any]:
        chunk, tokenizer = piece.chunk, self._tokenizer
        if tokenizer is None or not chunk.token_ids:
            return {}
        text = self._texts.setdefault(piece.index, Detokenizer(tokenizer))
        return {
            "headlong": {
                "tokens": [
                    {"text": text.push((token,)), "drafted": drafted}
                    for token, drafted in zip(chunk.token_ids, chunk.from_draft, strict=True)
                ],
                "num_drafted": chunk.num_drafted,
                "num_accepted": chunk.num_accepted,
                "rejected": [tokenizer.token_text(token) for token in chunk.rejected],
            }
        }
