"""Says which setting to change where a device has no room for what it sends there."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headlong.errors import ConfigError


@contextmanager
def room_on(device: torch.device) -> Iterator[None]:
    """What is put on the head's own device inside, there must be memory for."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError, OSError) as error:
        if not _lacks_memory(error):
            raise
        raise ConfigError(
            f"draft_device {str(device)!r} has no memory left for the head, what it copies of the model and its "
            f"cache ({str(error).splitlines()[0] if str(error) else type(error).__name__}); use another device, a "
            "smaller cache_tokens, or leave draft_device out"
        ) from error


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Torch's own allocator for the CPU has no class for it.
    return "allocate memory" in str(error) or getattr(error, "errno", None) == errno.ENOMEM
