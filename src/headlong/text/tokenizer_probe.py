"""Builds a tokenizer.json in a process of its own, whose time and memory are bounded, and reads a text with it: what
a file costs is found out here first. Imports nothing of Headlong's.
"""

import resource
import sys
from pathlib import Path

from tokenizers import Tokenizer

STATM = Path("/proc/self/statm")
SAMPLE = (
    "Once upon a time, in 2024: aaaa\tbbbb\n\n\u00e9\u4e2d\u6587 \U0001f4a5 def f(x): return {x!r}; " * 40
)
"""Letters, digits, white space, marks and what takes several bytes, for patterns and normalizers to work on."""


def main() -> None:
    path, seconds, most_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if STATM.exists():
        taken = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + most_bytes, taken + most_bytes))
    try:
        tokenizer = Tokenizer.from_file(path)
        for number in range(0, len(SAMPLE), 500):
            tokenizer.decode(tokenizer.encode(SAMPLE[: number + 500]).ids)
    except MemoryError:
        raise
    except BaseException:  # what is merely wrong, whoever builds it next tells in full
        return


if __name__ == "__main__":
    main()
