"""What calling a command gave, and the type of the fixture that calls one."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Headlong = Callable[..., Outcome]
