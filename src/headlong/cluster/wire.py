"""What travels between the front and its replicas, besides the engine's own values. Knows no Ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from headlong.engine.client import EngineDescription, EngineStats
from headlong.types import Request


@dataclass(frozen=True, kw_only=True)
class Work:
    """The first argument of every call that streams: what is to be computed, and what a router needs to place it."""

    tokens: tuple[int, ...]
    """The prompt's tokens, and those of the output that are to be read again."""
    weight: int
    """Tokens to compute at most, those of the prompt and those of all choices."""
    avoid: tuple[str, ...] = ()
    """Ids of replicas that must not be used: those that failed on it before."""
    requests: tuple[Request, ...] = ()
    """The choices of one prompt. They share its tuple, which travels once."""
    model: str = ""
    """What names the model that the tokens were made for."""
    fingerprint: str = ""
    """The fingerprint of the replica that began; empty where nothing was streamed and any will do."""
    alone: int = 0
    """How many tokens of each choice are to be computed without company, since the call is on trial; 0 where it is
    not."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """Headers that make what the replica does part of the front's trace; none where nobody traces."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a front has to know of a replica in order to make requests for it."""

    replica: str
    node: str
    """The machine it runs on."""
    model: str
    version: str
    """What the replica was made of: its model by name, its settings, its release."""
    placement: str
    """How it and its like were to be placed."""
    fingerprint: str
    eos_ids: frozenset[int]
    started: float
    """When it began to serve, in seconds since 1970."""
    description: EngineDescription


@dataclass(frozen=True)
class Report:
    """What a replica says of itself when it is asked."""

    facts: Facts
    stats: EngineStats


@dataclass(frozen=True)
class Hello:
    """The first item of every stream: who answers."""

    replica: str
    fingerprint: str


@dataclass(frozen=True)
class OnTrial:
    """The replica tries the call alone from now on: if it ends before that is over, the call may be why."""


@dataclass(frozen=True)
class Refused:
    """The last item of a stream that gives nothing more. `request` means that the request is at fault, `other` that
    this replica is not like the one that began, `failed` that the replica itself cannot go on."""

    kind: Literal["request", "other", "failed"]
    why: str


class RoutingStats(TypedDict):
    """What a replica reports to routers, every second or so. Bounded in size."""

    running: int
    waiting: int
    queued_tokens: int
    """Tokens that rows still have to read or to generate, at most."""
    prefixes: list[str]
    """Keys of pages in the prefix cache, in hexadecimal, the latest used first."""
    page_size: int
    fingerprint: str
