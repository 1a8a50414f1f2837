"""Compiles grammars in a process of its own, which may be killed: what a grammar costs is found out here first.

Reads a line of JSON for each grammar and answers with one. Building a lexer does not depend on the vocabulary, so that
a byte for each token will do. The process ends where a grammar takes more processor time or memory than it may. Imports
nothing of Headlong's: it starts in a moment.
"""

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

ROOM_BYTES = 64 << 20
"""Address space for what allocators set aside."""


class Bytes:
    """A vocabulary of all bytes and a model's special tokens, as the grammar library asks for one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, specials: list[str], size: int) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [name.encode("latin-1") for name in specials]
        self.tokens.append(b"<end>")
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.tokens += [b""] * (size - len(self.tokens))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


STATM = Path("/proc/self/statm")


def used_bytes() -> int:
    """The memory of this process; the most that it ever was where systems do not tell more."""
    if not STATM.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


class Prober:
    def __init__(self) -> None:
        self._key: tuple[int, tuple[str, ...]] | None = None
        self._tokenizer: Any = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The error of a grammar, empty if it can be compiled, and the bytes that it takes."""
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        found = self._measured(asked)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return found

    def _measured(self, asked: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self._tokenizer_of(asked["size"], asked["specials"])
        before = used_bytes()
        limits = LLParserLimits(**asked["limits"])
        matcher = LLMatcher(tokenizer, asked["grammar"], log_level=0, limits=limits)
        error = matcher.get_error() if matcher.is_error() else ""
        warnings = [] if error else matcher.get_grammar_warnings()
        return {"error": error, "warnings": warnings[:1], "bytes": max(0, used_bytes() - before)}

    def _tokenizer_of(self, size: int, specials: list[str]) -> Any:
        key = size, tuple(specials)
        if key != self._key:
            vocabulary: Any = Bytes(specials, size)
            self._tokenizer = LLTokenizer(vocabulary, eos_token=vocabulary.eos_token_id)
            self._key = key
        return self._tokenizer


def serve(most_bytes: int) -> None:
    """Answers until nobody asks any more. In memory that is bounded once the stack of this thread is set aside."""
    if STATM.exists():
        taken = int(STATM.read_text().split()[0]) * resource.getpagesize()
        limit = taken + most_bytes + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    prober = Prober()
    for line in sys.stdin.buffer:
        answer = prober.answer(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    stack_bytes, most_bytes = map(int, sys.argv[1:])
    os.nice(5)  # models go first where cores are few
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=serve, args=(most_bytes,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
