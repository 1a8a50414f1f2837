"""A constraint that is written down as a rule."""

from collections.abc import Callable, Sequence

import numpy as np

Rule = Callable[[list[int]], set[int] | None]


class Ruled:
    """A constraint that is a function of the output: the tokens allowed after it, or None for all."""

    def __init__(self, rule: Rule, vocab: int, fails_at: int = 999) -> None:
        self.rule, self.vocab, self.fails_at = rule, vocab, fails_at
        self.output: list[int] = []
        self.failure: str | None = None
        self.asked = 0
        self.slow, self.grace = False, 0.0

    def ready(self, seconds: float = 0.0) -> bool:  # noqa: ARG002
        return True

    def foresee(self, drafts: Sequence[int]) -> int:
        return len(drafts)

    def advance(self, tokens: Sequence[int]) -> int:
        good = min(len(tokens), self.fails_at - len(self.output))
        self.output += tokens[:good]
        self.failure = None if good == len(tokens) else "out of steps"
        return good

    def masks(
        self,
        drafts: Sequence[int],
        first: int,
        count: int,
        *,
        patient: bool = True,  # noqa: ARG002
    ) -> list[bytes | None]:
        self.asked += 1
        masks: list[bytes | None] = []
        for place in range(first, first + count):
            allowed = self.rule(self.output + list(drafts[:place]))
            bits = np.isin(np.arange(self.vocab + 5), list(allowed or ()))
            masks.append(None if allowed is None else np.packbits(bits, bitorder="little").tobytes())
        return masks
