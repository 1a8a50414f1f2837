"""What a run that was killed has left of the files it was writing: told from those that somebody writes, and removed.

Who writes holds a lock on the temporary name, which ends with its process. Knows temporary names, not what they hold.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"
"""The ending of every temporary name. Nothing reads files with this ending."""
OLD = f".old{PARTIAL}"
"""What is added to the temporary name of a folder, for the one that it replaces."""


@contextmanager
def writing(partial: Path) -> Iterator[None]:
    """Inside of it nobody takes the file or folder for one that was left."""
    handle = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def clear_leftovers(path: Path) -> list[str]:
    """Removes what is left of runs that were killed while they wrote `path`, and puts back what they had moved away to
    replace it. Returns a sentence for each."""
    parent = path.absolute().parent
    pattern = re.compile(rf"(\.{re.escape(path.name)}\.[a-z0-9_]{{8}}{re.escape(PARTIAL)})(\..*)?")
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return []
    found = [(name, match[1]) for name in names if (match := pattern.fullmatch(name)) is not None]
    said = []
    for name, first in found:
        left = parent / name
        if _is_being_written(parent / first):
            continue
        with suppress(OSError):  # which whoever writes next will meet, and tell
            if name == first + OLD and not path.exists():
                os.replace(left, path)
                said.append(f"{path} was put back: a run that was to replace it was killed")
            else:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
                said.append(f"{left.name} was removed: a run that was killed had left it half written")
    return said


def _is_being_written(partial: Path) -> bool:
    try:
        handle = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: nobody can tell
        return True
    else:
        return False
    finally:
        os.close(handle)
