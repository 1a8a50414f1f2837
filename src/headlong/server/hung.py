"""Ends a process whose engine hangs, so that whoever supervises it can start it anew.

A thread that does not come back from a device or a lock can neither be ended nor its memory freed. Clients are told
first, and `/health` answers 503 meanwhile.
"""

import asyncio
import logging
import os
import sys

from headlong.server.pool import ModelPool

EXIT_HUNG = 70
"""The status that a server ends with whose engine hangs; systemd restarts on it, and so does Docker."""
POLL_SECONDS = 0.25
LAST_WORDS_SECONDS = 3.0
"""How long clients may read their errors, and those who watch ask how the server is."""
log = logging.getLogger(__name__)


async def end_if_hung(pool: ModelPool) -> None:
    """Watches the pool's engines until one hangs; does not return then."""
    while not (found := pool.hung()):
        await asyncio.sleep(POLL_SECONDS)
    log.critical("%s hangs; the process ends with status %d", ", ".join(found), EXIT_HUNG)
    await asyncio.sleep(LAST_WORDS_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a device that is full, or a stream that is closed
            continue
    os._exit(EXIT_HUNG)  # waits for no thread
