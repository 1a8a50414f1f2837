"""What travels between the front and its replicas, besides the engine's own values. Knows no Ray."""

from dataclasses import dataclass
from typing import TypedDict

from headlong.types import Request


@dataclass(frozen=True, kw_only=True)
class Work:
    """The first argument of every call that streams: what is to be computed, and what a router needs to place it."""

    tokens: tuple[int, ...]
    """The prompt's tokens, and those of the output that are to be read again."""
    weight: int
    """Tokens to compute at most, those of the prompt and those of all choices."""
    requests: tuple[Request, ...] = ()
    """The choices of one prompt. They share its tuple, which travels once."""
    avoid: tuple[str, ...] = ()
    """Ids of replicas that must not be used: those that failed on it before."""
    fingerprint: str = ""
    """The replicas' fingerprint that the requests were made for; empty where any will do."""


class RoutingStats(TypedDict):
    """What a replica reports to routers, every second or so. Bounded in size."""

    running: int
    waiting: int
    queued_tokens: int
    """Tokens that rows still have to read or to generate, at most."""
    prefixes: list[str]
    """Keys of cached pages, the latest used first."""
    page_size: int
    fingerprint: str
