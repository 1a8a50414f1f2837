"""Responses that are kept for a while, so that a later request can go on from one by its id. In memory, within bounds.

The least recently used go first, and all go with the process. A response is its maker's: nobody else's key finds it.
Knows neither models nor requests.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from pydantic import TypeAdapter

from headlong.server.errors import ApiError
from headlong.server.schemas.responses import Item
from headlong.server.writing import written

_ITEM: TypeAdapter[Item] = TypeAdapter(Item)


@dataclass(frozen=True)
class Stored:
    """A conversation up to and with one response, as JSON: the garbage collector looks at objects again and again."""

    owner: str
    id: str
    response: str
    """The response as the client received it."""
    given: tuple[str, ...]
    """The items before the response, those of earlier responses among them; instructions are not."""
    made: tuple[str, ...]
    """The response's own output."""

    @property
    def nbytes(self) -> int:
        return len(self.response) + sum(map(len, self.given)) + sum(map(len, self.made))

    def conversation(self) -> list[Item]:
        """The items before the response, and its own."""
        return [_ITEM.validate_json(one) for one in (*self.given, *self.made)]


class ResponseStore:
    """Stored responses, up to a number of bytes. Any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._lock = Lock()

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def keep(self, owner: str, response: dict[str, Any], given: Sequence[Item], made: Sequence[Item]) -> None:
        """Stores a response, in place of the oldest ones; one that is larger than all the space is not kept."""
        items = [tuple(one.model_dump_json(exclude_none=True) for one in listed) for listed in (given, made)]
        stored = Stored(owner, response["id"], written(response), *items)
        if stored.nbytes > self._max_bytes:
            return
        with self._lock:
            self._stored[stored.id] = stored
            self._bytes += stored.nbytes
            while self._bytes > self._max_bytes:
                self._bytes -= self._stored.popitem(last=False)[1].nbytes

    def get(self, response_id: str, owner: str, field: str | None = None) -> Stored:
        """Returns a stored response. Where there is none it raises a 404, or a 400 if a request's `field` named it."""
        with self._lock:
            stored = self._stored.get(response_id)
            if stored is None or stored.owner != owner:
                raise self._unknown(response_id, field)
            self._stored.move_to_end(response_id)
            return stored

    def forget(self, response_id: str, owner: str) -> None:
        """Raises where there is none, as `get` does."""
        self.get(response_id, owner)
        with self._lock:
            if (gone := self._stored.pop(response_id, None)) is not None:
                self._bytes -= gone.nbytes

    def _unknown(self, response_id: str, field: str | None) -> ApiError:
        why = "it was never stored, or was dropped for newer ones" if self.is_on else "nothing is stored here"
        where = "" if field is None else f"{field}: "
        return ApiError(
            404 if field is None else 400,
            f"{where}there is no response {response_id[:80]!r}: {why}; send the whole conversation in input",
            param=field,
            code="previous_response_not_found" if field else "not_found",
        )
