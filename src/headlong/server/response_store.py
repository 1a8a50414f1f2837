"""Responses that are kept for a while, so that a later request can go on from one by its id. In memory, within bounds.

The least recently used go first, and all go with the process. A response is its maker's: nobody else's key finds it.
Knows neither models nor requests.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headlong.server.errors import ApiError
from headlong.server.schemas.responses import Item


@dataclass(frozen=True)
class Stored:
    """A conversation up to and with one response."""

    owner: str
    response: dict[str, Any]
    """The response as the client received it."""
    given: tuple[Item, ...]
    """The items before the response, those of earlier responses among them; instructions are not."""
    made: tuple[Item, ...]
    """The response's own output."""
    nbytes: int


class ResponseStore:
    """Stored responses, up to a number of bytes. It is used on the event loop alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def keep(self, owner: str, response: dict[str, Any], given: Sequence[Item], made: Sequence[Item]) -> None:
        """Stores a response, in place of the oldest ones; one that is larger than all the space is not kept."""
        nbytes = len(json.dumps(response)) + sum(len(item.model_dump_json()) for item in (*given, *made))
        if nbytes > self._max_bytes:
            return
        self._stored[response["id"]] = Stored(owner, response, tuple(given), tuple(made), nbytes)
        self._bytes += nbytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._stored.popitem(last=False)[1].nbytes

    def get(self, response_id: str, owner: str, field: str | None = None) -> Stored:
        """Returns a stored response. Where there is none it raises a 404, or a 400 if a request's `field` named it."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise self._unknown(response_id, field)
        self._stored.move_to_end(response_id)
        return stored

    def forget(self, response_id: str, owner: str) -> None:
        self._bytes -= self.get(response_id, owner).nbytes
        del self._stored[response_id]

    def _unknown(self, response_id: str, field: str | None) -> ApiError:
        why = "it was never stored, or was dropped for newer ones" if self.is_on else "nothing is stored here"
        where = "" if field is None else f"{field}: "
        return ApiError(
            404 if field is None else 400,
            f"{where}there is no response {response_id[:80]!r}: {why}; send the whole conversation in input",
            param=field,
            code="previous_response_not_found" if field else "not_found",
        )
