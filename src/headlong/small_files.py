"""Opens files that nobody vouches for, and reads small ones: only regular ones, only up to a size. Knows nothing of
what is in them.

A pipe would wait for a writer that never comes, a device would not end. The check is made on what was opened.
"""

import errno
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def read_bytes(path: Path, limit: int) -> bytes:
    """The file's bytes. An OSError says in its `strerror` what is wrong, as those of the system do."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else BufferedReader(file).read(limit + 1)
    if max(len(data), size) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
    return data


def open_regular(path: Path) -> FileIO:
    """The file, open to be read, without a buffer. What else has its name by now is refused with an OSError."""
    handle = os.open(path, _FLAGS)
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return FileIO(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_text(path: Path, limit: int) -> str:
    """The same as UTF-8 text."""
    return read_bytes(path, limit).decode("utf-8")
