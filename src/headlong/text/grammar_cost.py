"""What a grammar costs, known before this process compiles it: one that may cost much is first compiled by another
process, which can be ended and whose memory is bounded.

A thread inside the grammar library cannot be stopped, and none of its limits holds for intersections.
Knows no tokenizer.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from headlong.errors import BusyError
from headlong.params import Grammar

MAX_PROCESSES = 2
MAX_WAIT_SECONDS = 5.0
"""The longest that a grammar waits for its turn."""
MAX_CPU_SECONDS = 2.0
MAX_WALL_SECONDS = 20.0
MAX_BYTES = 64 << 20
STACK_BYTES = 256 << 20
"""The stack of a compiling thread. The library recurses from rule to rule; a chain of some thousand rules overruns a
usual stack and ends the process."""
MAX_PLAIN_CHARS = 8192
_COSTLY = re.compile(
    r"\\|[0-9]{4}|\"(pattern|patternProperties|propertyNames|allOf|oneOf|not|if|multipleOf|format|x-guidance)\""
)
"""Words of a JSON schema that may make it cost more than its length says. A member of that name costs nothing but the
check."""
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
"""The library's limits. A state takes a kilobyte or two."""


class Cost(NamedTuple):
    """What was found out about a grammar that can be compiled within bounds."""

    num_bytes: int
    error: str = ""
    """What is wrong with it, in the library's words."""
    warning: str = ""


class TooCostly(Exception):
    """The grammar takes more time or memory than one may; its text says which."""


def is_plain(grammar: Grammar) -> bool:
    """Whether a grammar cannot cost more than in proportion to its length."""
    parts = [grammar] if grammar.alternative is None else [grammar, grammar.alternative]
    return all(_is_plain(one) for one in parts)


def _is_plain(grammar: Grammar) -> bool:
    if len(grammar.source) > MAX_PLAIN_CHARS:
        return False
    if grammar.kind in ("json_object", "choice"):
        return True
    return grammar.kind == "json_schema" and _COSTLY.search(grammar.source) is None


def measure(text: str, specials: tuple[bytes, ...] = (), size: int = 0) -> Cost:
    """The cost of a grammar in the library's own form. `specials` are the special tokens that it may name, among `size`
    tokens. Raises `TooCostly`, or `BusyError` where others are being measured."""
    if not _places.acquire(timeout=MAX_WAIT_SECONDS):
        raise BusyError("grammar: others are being compiled; try again later")
    try:
        process = _Process.idle()
        answer = process.ask(
            {
                "grammar": text,
                "specials": [name.decode("latin-1") for name in specials],
                "size": size,
                "seconds": MAX_CPU_SECONDS,
                "limits": LIMITS,
            }
        )
        if answer["bytes"] > MAX_BYTES // 8:
            process.end()  # its allocator keeps what it had
        else:
            _idle.append(process)
    finally:
        _places.release()
    if answer["bytes"] > MAX_BYTES:
        raise TooCostly(f"it takes more than {MAX_BYTES >> 20} MiB")
    return Cost(answer["bytes"], answer["error"], "".join(answer["warnings"]))


_places = threading.BoundedSemaphore(MAX_PROCESSES)


class _Process:
    """A process that measures, one grammar after the other. It ends when this one does."""

    @classmethod
    def idle(cls) -> "_Process":
        try:
            return _idle.pop()
        except IndexError:
            return cls()

    def __init__(self) -> None:
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        # One arena: a thread's own one would reserve more address space than a grammar may take.
        environment = os.environ | {"PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"}
        sizes = str(STACK_BYTES), str(2 * MAX_BYTES)
        command = [sys.executable, "-m", "headlong.text.grammar_probe", *sizes]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, bufsize=0
            )
        except OSError as error:
            raise BusyError(f"grammar: no process to compile it in could be started ({error})") from error

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer; where the process ends instead, `TooCostly`."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        ready: list[Any] = [stdout]
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            ready, _, _ = select.select([stdout], [], [], MAX_WALL_SECONDS)
            line = stdout.readline() if ready else b""
        except OSError:
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        ended = self.end()
        if ended == -signal.SIGPROF:
            raise TooCostly(f"compiling it takes longer than {MAX_CPU_SECONDS:g} seconds")
        if not ready:
            raise BusyError("grammar: this machine is too busy to compile it; try again later")
        raise TooCostly(f"compiling it takes more than {MAX_BYTES >> 20} MiB")

    def end(self) -> int:
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        return code


_idle: list[_Process] = []
