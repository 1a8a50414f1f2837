"""Log-probabilities as OpenAI's chat and responses show them, and which text they belong to."""

from collections.abc import Iterable
from typing import Any

from headlong.server.blocks import Blocks
from headlong.text.output import OutputEvent, OutputReader
from headlong.text.stream import Detokenizer
from headlong.text.tokenizer import Tokenizer
from headlong.types import ReadToken, TokenLogprobs

LOWEST = -9999.0
"""What stands for minus infinity, which JSON has not."""


def shown(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        _token(tokenizer, one.token_id, one.logprob)
        | {"top_logprobs": [_token(tokenizer, token, logprob) for token, logprob in one.top]}
        for one in logprobs
    ]


def prompt_shown(
    tokenizer: Tokenizer | None, read: Iterable[ReadToken]
) -> list[dict[str, dict[str, Any]] | None]:
    """The tokens of a prompt as vLLM shows them: nothing for the first, then the token that came and the likeliest
    ones, by their ids."""
    listed: list[dict[str, dict[str, Any]] | None] = [None]
    for one in read:
        chosen = (one.rank, one.logprobs.token_id, one.logprobs.logprob)
        best = [(rank, *pair) for rank, pair in enumerate(one.logprobs.top, 1)]
        listed.append(
            {
                str(token): {
                    "logprob": max(logprob, LOWEST),
                    "rank": rank,
                    "decoded_token": None if tokenizer is None else tokenizer.token_text(token),
                }
                for rank, token, logprob in [*best, chosen]
            }
        )
    return listed


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token),
        "logprob": max(logprob, LOWEST),
        "bytes": list(tokenizer.token_bytes(token)),
    }


class TextLogprobs:
    """Sorts the tokens of an output to its blocks of text; those of reasoning, calls and markup drop out.

    Reads token by token with a parser of its own, so that it does not matter which tokens shared a step.
    """

    def __init__(self, tokenizer: Tokenizer, parser: OutputReader) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer)
        self._parser = parser
        self._blocks = Blocks()
        self._unsettled: list[TokenLogprobs] = []
        self._settled: dict[int, list[TokenLogprobs]] = {}
        self._taken: dict[int, int] = {}

    def push(self, logprobs: Iterable[TokenLogprobs]) -> None:
        for one in logprobs:
            if not self._tokenizer.is_special(one.token_id):
                self._unsettled.append(one)
            self._settle(self._parser.push(self._text.push((one.token_id,))))

    def finish(self) -> None:
        self._settle(self._parser.finish())

    def all(self, block: int) -> list[dict[str, Any]]:
        """The log-probabilities of a block so far."""
        return shown(self._tokenizer, self._settled.get(block, ()))

    def more(self, block: int) -> list[dict[str, Any]]:
        """The log-probabilities of a block that came since the last call."""
        settled, start = self._settled.get(block, []), self._taken.get(block, 0)
        self._taken[block] = len(settled)
        return shown(self._tokenizer, settled[start:])

    def _settle(self, events: Iterable[OutputEvent]) -> None:
        changes = self._blocks.take(events)
        for change in changes:
            if change.what == "grew" and change.block.type == "text":
                self._claim(change.block.index, change.text.encode())
        if changes and changes[-1].block.type != "text":
            self._unsettled.clear()

    def _claim(self, block: int, text: bytes) -> None:
        """Finds the tokens of a text that came out. What is left unsettled before it was markup, after it is text
        that a parser still holds back."""
        spelled = [self._tokenizer.token_bytes(one.token_id) for one in self._unsettled]
        whole = b"".join(spelled)
        # Only what opens a block can follow markup, which may hold the same letters.
        start = whole.rfind(text) if block not in self._settled else whole.find(text)
        if start < 0:  # a reader puts an empty line between two messages, which no token says
            text = text.removeprefix(b"\n\n")
            start = whole.rfind(text)
        start, end = (start, start + len(text)) if start >= 0 else (0, len(whole))
        settled = self._settled.setdefault(block, [])
        unsettled, self._unsettled = self._unsettled, []
        place = 0
        for one, own in zip(unsettled, spelled, strict=True):
            if place >= end:
                self._unsettled.append(one)
            elif place + len(own) > start:
                settled.append(one)
            place += len(own)
