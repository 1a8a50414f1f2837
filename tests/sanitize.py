"""The native tests over kernels built with the address and undefined-behaviour sanitizers: `make sanitize`.

The product has a version for each set of instructions, and a CPU runs the widest it can; here the narrower ones have
their turn too. What a sanitizer finds ends the run with its report. Needs GCC; reads from pyproject.toml how the
library is built.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support.native_build import ROOT, native_extension

TESTS = [
    f"tests/ops/test_{name}.py"
    for name in ("native", "native_linear", "native_moe", "vocabulary", "program", "draw")
]
SANITIZERS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
]
ASKING = (
    # What the CPU has, but for what the tests do without. The name inside is the compiler's own again.
    '-D__builtin_cpu_supports(feature)=(__builtin_cpu_supports(feature) && !strstr(getenv("WITHOUT"), feature))'
)
WITHOUT = {
    "with all this CPU has": "",
    "without products of bytes": "avx512vnni",
    "without bfloat16": "avx512bf16",
    "without AVX-512": "avx512bw",
    "without AVX": "avx512bw avx2",
}


def build(library: Path) -> None:
    native = native_extension()
    options = [option for option in native["extra-compile-args"] if not option.startswith("-O")]
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        *options,
        *SANITIZERS,
        "-include",
        "stdlib.h",
        "-include",
        "string.h",
    ]
    command += [ASKING, *native["sources"], *native["extra-link-args"]]
    command += [*(f"-l{name}" for name in native["libraries"]), "-o", str(library)]
    subprocess.run(command, cwd=ROOT, check=True)


def file_of(name: str) -> str:
    return subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()


def run(library: Path, without: str, arguments: list[str]) -> int:
    env = os.environ | {
        "HEADLONG_NATIVE": str(library),
        "WITHOUT": without,
        # The sanitizer before all else, and with it the C++ library, whose exceptions it has to know.
        "LD_PRELOAD": f"{file_of('libasan.so')}:{file_of('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # Uncaptured: when a report is written, nobody is left to show what was captured.
    command = [sys.executable, "-m", "pytest", "-s", *(arguments or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "native.so"
        print("building with sanitizers", flush=True)
        build(library)
        for name, without in WITHOUT.items():
            print(f"\n{name}", flush=True)
            if status := run(library, without, sys.argv[1:]):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
