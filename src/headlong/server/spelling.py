"""Whether an unknown field's name is a known one misspelt. Cautious: another name may be right somewhere else."""

from collections.abc import Iterable

MAX_CHARS = 40
"""Longer names are nobody's slip of the pen."""
ONE_SLIP, TWO_SLIPS = 6, 10
"""How long a name must be for another to be taken for it that differs in one letter, or in two."""
SHORTEST, MAX_SLIPS = 5, 2


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: the same but for case and dashes, a plural, or a slip or two."""
    if not 2 <= len(name) <= MAX_CHARS:
        return None
    plain = _plain(name)
    best, slips = None, MAX_SLIPS + 1
    for one in known:
        other = _plain(one)
        if plain == other or (len(plain) > 3 and (plain + "s" == other or plain == other + "s")):
            return one
        if abs(len(plain) - len(other)) < slips and min(len(plain), len(other)) >= SHORTEST:
            found = _distance(plain, other)
            if found < slips and found <= _allowed(other):
                best, slips = one, found
    return best


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").replace(" ", "").lower()


def _allowed(meant: str) -> int:
    return MAX_SLIPS if len(meant) >= TWO_SLIPS else 1 if len(meant) >= ONE_SLIP else 0


def _distance(one: str, other: str) -> int:
    """Counts the letters left out, added, changed, or swapped with their neighbours (optimal string alignment)."""
    before, last = [], list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        line = [row]
        for column, wanted in enumerate(other, 1):
            found = min(line[-1] + 1, last[column] + 1, last[column - 1] + (letter != wanted))
            if row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == wanted:
                found = min(found, before[column - 2] + 1)
            line.append(found)
        before, last = last, line
    return last[-1]
