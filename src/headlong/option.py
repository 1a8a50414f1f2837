"""What may stand in a setting, and how people are told: one value for each row of the tables of settings.

The engine's rows stand on the fields of `EngineConfig`, the server's on those of its own settings. Flags, environment
variables, config.yml, load requests, help and docs are made from them. Imports no torch: help must answer at once.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

ValueType = Literal[
    "text", "whole", "number", "switch", "choice", "depth", "tokens", "list", "keys", "sampling", "key limits"
]


@dataclass(frozen=True)
class Option:
    """One row of such a table."""

    group: str
    """The heading in help and docs under which the rows of a group stand together."""
    type: ValueType
    help: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf
    """The upper bound of a number, as `low` is the lower one; for a text that comes with a request, the bounds of its
    length."""
    flags: tuple[str, ...] = ()
    """Further names of its flag, as other servers have them."""
    aliases: tuple[str, ...] = ()
    """Further names of its field in a request to load a model."""
    local: bool = False
    """Whether only those who start an engine may set it, and no request: it may name a file of this machine."""
    metavar: str = ""
    """What stands for the value in help; empty for the word of its type."""


METAVARS: dict[ValueType, str] = {
    "text": "TEXT",
    "whole": "N",
    "number": "X",
    "depth": "N|auto",
    "tokens": "N|FILE",
    "list": "LIST",
    "keys": "KEYS",
    "sampling": "JSON",
    "key limits": "JSON",
}


def metavar(option: Option) -> str:
    return option.metavar or "|".join(option.choices) or METAVARS[option.type]


def options_of(table: type) -> dict[str, Option]:
    """Returns the rows that stand on a dataclass's fields, by name, in order."""
    return {
        field.name: field.metadata["option"]
        for field in dataclasses.fields(table)
        if "option" in field.metadata
    }


def field_for(option: Option, default: Any) -> Any:
    """Makes a dataclass's field that carries its row."""
    metadata = {"option": option}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
