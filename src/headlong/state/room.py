"""Tells a lack of memory from other faults, and which setting to change where the head's own device has no room."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headlong.errors import ConfigError

COMPLAINTS = ("out of memory", "can't allocate memory", "not enough memory")


@contextmanager
def room_on(device: torch.device) -> Iterator[None]:
    """What is put on the head's own device inside, there must be memory for."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError, OSError) as error:
        if not lacks_memory(error):
            raise
        raise ConfigError(
            f"draft_device {str(device)!r} has no memory left for the head, what it copies of the model and its "
            f"cache ({str(error).splitlines()[0] if str(error) else type(error).__name__}); use another device, a "
            "smaller cache_tokens, or leave draft_device out"
        ) from error


def lacks_memory(error: BaseException) -> bool:
    """Whether an allocator had no room, the device's, torch's or the system's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Torch's own allocator for the CPU has no class for it.
    return isinstance(error, RuntimeError) and any(words in str(error) for words in COMPLAINTS)
