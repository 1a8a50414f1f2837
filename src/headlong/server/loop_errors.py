"""What the event loop could not do by itself: one line of our log for each, and one a second where files run out.

A loop that cannot accept a connection tries again for every place in its backlog, so thousands of times a second, until
somebody leaves. Knows no HTTP.
"""

import asyncio
import errno
import logging
import time
from typing import Any

NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
TELL_SECONDS = 1.0
log = logging.getLogger(__name__)


class LoopErrors:
    """The exception handler of one event loop."""

    def __init__(self) -> None:
        self._told = -TELL_SECONDS
        self._untold = 0

    def __call__(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in NO_FILES:
            self._no_files(error)
            return
        log.error(
            "the event loop: %s",
            context.get("message", "an error"),
            exc_info=error if isinstance(error, Exception) else None,
        )

    def _no_files(self, error: OSError) -> None:
        """Connections wait until one can be accepted; the loop tries again after a second."""
        self._untold += 1
        if time.monotonic() - self._told < TELL_SECONDS:
            return
        fields = {"attempts": self._untold}
        log.error(
            "no connection can be accepted (%s); raise `ulimit -n`, or lower max_connections",
            error.strerror,
            extra={"fields": fields},
        )
        self._told, self._untold = time.monotonic(), 0
