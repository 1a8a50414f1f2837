"""What becomes of a field that real clients send and that no schema has: one rule for each name.

A schema's own fields are honoured. Beside them it may have `rules`, a table from names to one of three kinds of rule:
the field is another server's name for one that is honoured, or it cannot change the answer here and is accepted, or it
would change the answer and is refused with what to use instead. The tables are what `headlong.server.sifting` goes by
and what docs/fields.md shows. Knows no request.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Harmless: TypeAlias = Callable[[Any], bool]


@dataclass(frozen=True)
class WithoutEffect:
    """A field that is accepted, named in a header of the answer and logged once for each client."""

    why: str


@dataclass(frozen=True)
class Unsupported:
    """A field that is refused, unless its value asks for nothing."""

    why: str
    """The reason, and what to use instead."""
    harmless: tuple[Any, ...] = ()
    """Values that ask for nothing, or functions that know them; null always does."""
    details: Mapping[str, Any] | None = None
    """What Anthropic's clients read from `error.details`."""

    def allows(self, value: Any) -> bool:
        return any(
            known(value) if callable(known) else (type(value), value) == (type(known), known)
            for known in self.harmless
        )


@dataclass(frozen=True)
class Renamed:
    """A field that is honoured as others: the client's value is read as theirs."""

    why: str
    """What it is the same as."""
    fields: Callable[[Any], Mapping[str, Any]]
    """The fields that say the same; none for a value that asks for nothing."""


Rule: TypeAlias = WithoutEffect | Unsupported | Renamed
Rules: TypeAlias = Mapping[str, Rule]
EMPTY: tuple[Any, ...] = ("", [], {}, False)
"""Values by which a client says that it wants nothing of the kind."""


def without_effect(why: str, *names: str) -> dict[str, Rule]:
    """Rows for fields that are accepted for the same reason."""
    return dict.fromkeys(names, WithoutEffect(why))


def renamed(field: str, *names: str, nothing: tuple[Any, ...] = (), why: str = "") -> dict[str, Rule]:
    """Rows for other servers' names of one field; `nothing` are values that ask for nothing."""

    def fields(value: Any) -> Mapping[str, Any]:
        return {} if any((type(value), value) == (type(one), one) for one in nothing) else {field: value}

    return dict.fromkeys(names, Renamed(why or f"the same as {field}", fields))


def unsupported(
    why: str, *names: str, harmless: tuple[Any, ...] = EMPTY, details: Mapping[str, Any] | None = None
) -> dict[str, Rule]:
    """Rows for fields that are refused for the same reason."""
    return dict.fromkeys(names, Unsupported(why, harmless, details))
