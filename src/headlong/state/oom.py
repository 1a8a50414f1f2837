"""Recognises out-of-memory errors, and names the settings to change when the head's own device is out of memory."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headlong.errors import ConfigError

OOM_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


@contextmanager
def refusing_oom_on(device: torch.device) -> Iterator[None]:
    """Turns an out-of-memory error raised inside the block into a ConfigError about the head's own device."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError, OSError) as error:
        if not is_oom(error):
            raise
        raise ConfigError(
            f"draft_device {str(device)!r} has no memory left for the head, what it copies of the model and its "
            f"cache ({str(error).splitlines()[0] if str(error) else type(error).__name__}); use another device, a "
            "smaller cache_tokens, or leave draft_device out"
        ) from error


def is_oom(error: BaseException) -> bool:
    """Whether an allocator ran out of memory: the device's, torch's or the system's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Torch's own allocator for the CPU raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OOM_MESSAGES)
