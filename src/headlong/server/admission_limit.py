"""How much is let in: a bounded number of sequences for each model, and none while the server is draining."""

import contextlib
import math
from collections.abc import Iterator

from headlong.server.errors import ApiError
from headlong.server.model import Model

MAX_RETRY_SECONDS = 60


class AdmissionLimit:
    """Counts each model's sequences from admission to the end of their request, and refuses those that are too many.

    Used on the event loop alone.
    """

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.draining = False
        self._open: dict[str, int] = {}
        self._mean_seconds = 1.0

    @contextlib.contextmanager
    def admit(self, model: Model, num_rows: int) -> Iterator[None]:
        """Holds a place for `num_rows` sequences, or raises a 429 that says when to come back."""
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down; it finishes what it has and takes nothing new",
                type="server_error",
                code="draining",
                headers={"retry-after": "5"},
            )
        room = model.client.description.max_rows + self.max_queue
        if num_rows > room:
            raise ApiError(
                400, f"n: {num_rows} sequences at once are more than this server takes ({room})", param="n"
            )
        if self._open.get(model.id, 0) + num_rows > room:
            raise self._full(model)
        self._open[model.id] = self._open.get(model.id, 0) + num_rows
        try:
            yield
        finally:
            self._open[model.id] -= num_rows

    def took(self, seconds: float) -> None:
        """A request ended after this long; what the next 429 says depends on it."""
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def _full(self, model: Model) -> ApiError:
        max_rows = model.client.description.max_rows
        waiting = max(1, self._open[model.id] - max_rows)
        seconds = math.ceil(self._mean_seconds * waiting / max_rows)
        return ApiError(
            429,
            f"the queue is full ({self.max_queue} sequences wait); try again later",
            type="rate_limit_error",
            code="queue_full",
            headers={"retry-after": str(min(max(1, seconds), MAX_RETRY_SECONDS))},
        )
