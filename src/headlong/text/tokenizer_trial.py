"""Whether a tokenizer.json can be built within bounds, found out by a process that can be ended: inside the library a
thread cannot be stopped, and memory that is not there ends the process. Knows no tokens.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from headlong.errors import CheckpointError

MAX_CPU_SECONDS = 60
MAX_WALL_SECONDS = 600.0
MAX_BYTES = 4 << 30


def try_out(path: Path) -> None:
    """Raises a `CheckpointError` where the file takes more time or memory than one may. What else is wrong with it is
    told where it is built."""
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": paths,
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_ARENA_MAX": "1",
    }
    command = [sys.executable, "-m", "headlong.text.tokenizer_probe", str(path.absolute())]
    try:
        done = subprocess.run(
            [*command, str(MAX_CPU_SECONDS), str(MAX_BYTES)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=MAX_WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise _fault(path, f"building it takes longer than {MAX_WALL_SECONDS:g} seconds") from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: no process to try it in could be started ({error}); try again"
        ) from error
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _fault(path, f"building it takes longer than {MAX_CPU_SECONDS} seconds of processor time")
    if done.returncode:
        raise _fault(path, f"building it takes more than {MAX_BYTES >> 20} MiB, or ends the process")


def _fault(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: not a readable tokenizer ({why}); download it again")
