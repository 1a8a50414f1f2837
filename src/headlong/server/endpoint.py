"""What an endpoint is: a path, who may use it, what it takes, and who answers."""

from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    access: Literal["open", "user", "admin"]
    summary: str
    body: type[BaseModel] | None = None
    optional: bool = False
    """Whether a request may come without a body."""
