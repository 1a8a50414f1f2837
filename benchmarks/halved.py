"""A constraint that costs the host next to nothing, so that what is left is the engine's own time."""

from collections.abc import Sequence

from headlong.params import Grammar

HELD = Grammar("regex", "what Halved allows")


class Halved:
    """Every second token is allowed."""

    failure = None

    def __init__(self, vocab_size: int) -> None:
        self.mask = b"\x55" * (vocab_size // 8 + 1)

    def advance(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def masks(self, drafts: Sequence[int], first: int, count: int) -> list[bytes | None]:  # noqa: ARG002
        return [self.mask] * count
