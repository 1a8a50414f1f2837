"""The native kernels built for 64-bit ARM, whose vectors become NEON, and run under QEMU: `make cross`.

With `--library FILE` a library that was built already, such as that of a wheel, is what runs under QEMU.

`cross/driver.c` calls every kernel on the same numbers here and there. Tokens and laid out weights must be the same,
floats near enough for sums in another order; that bits depend on neither company nor threads the driver sees to
itself. Speed is not looked at. Needs GCC for both machines and QEMU's user mode; says what is missing.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from support.native_build import ROOT, native_extension

NEEDED = {
    "gcc": "gcc",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
}
ARM_ROOT = "/usr/aarch64-linux-gnu"
"""Where the cross compiler's C library lies."""
DRIVER = ROOT / "tests" / "cross" / "driver.c"
CLOSE = 1e-5
"""Of the largest number of a result: float32 sums of some hundred terms in another order."""
CLOSE_AS_BF16 = 2**-7
"""Of the number itself: a rounding to bfloat16 that went the other way."""
Results = dict[str, tuple[str, np.ndarray]]


def build(compiler: str, program: Path, *more: str, library: Path | None = None) -> None:
    """The driver with the kernels in it, or with those of a library."""
    native = native_extension()
    include = f"-I{ROOT / 'src' / 'headlong' / 'ops' / 'csrc'}"
    kernels = native["sources"] if library is None else [str(library)]
    command = [compiler, *native["extra-compile-args"], "-Wall", "-Werror", include, *more]
    command += [str(DRIVER), *kernels, *native["extra-link-args"]]
    subprocess.run(
        [*command, *(f"-l{name}" for name in native["libraries"]), "-o", str(program)], cwd=ROOT, check=True
    )


def results_of(*command: str) -> Results:
    """By name; those of one name are numbered."""
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    results: Results = {}
    at = 0
    while at < len(said):
        end = said.index(b"\n", at)
        name, kind, count = said[at:end].decode().split()
        dtype = {"f": "<f4", "q": "<i8", "h": "<u2", "b": "u1"}[kind]
        nbytes = int(count) * (1 if kind in "hb" else np.dtype(dtype).itemsize)
        at = end + 1 + nbytes
        number = sum(other.startswith(f"{name} ") for other in results)
        results[f"{name} {number}"] = kind, np.frombuffer(said[end + 1 : at], dtype)
    return results


def difference(kind: str, ours: np.ndarray, theirs: np.ndarray) -> float:
    """In units of what is allowed."""
    if kind in "qb":
        return 0.0 if np.array_equal(ours, theirs) else np.inf
    if kind == "h":
        ours, theirs = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (ours, theirs))
    if not np.array_equal(np.isfinite(ours), np.isfinite(theirs)):
        return np.inf
    finite = np.isfinite(theirs)
    ours, theirs = ours[finite].astype(np.float64), theirs[finite].astype(np.float64)
    allowed = CLOSE_AS_BF16 * np.abs(theirs) if kind == "h" else CLOSE * np.abs(theirs).max()
    # Where 0 is allowed, 0 must be.
    return float((np.abs(ours - theirs) / np.maximum(allowed, np.finfo(np.float64).tiny)).max())


def compare(arm: Results, here: Results) -> int:
    """How many results differ."""
    wrong = 0
    for name, (kind, found) in arm.items():
        # Activations are rounded to bfloat16 only where the CPU multiplies it.
        unrounded = name.replace("BF16_ROUNDED", "BF16")
        expected = arm[unrounded][1] if unrounded != name else here[name][1]
        far = difference(kind, found, expected)
        if unrounded != name and not np.array_equal(found, expected, equal_nan=True):
            far = np.inf
        print(f"{name:32} {len(found):7} {'bits' if kind in 'qb' else f'{far:.3f} of what is allowed'}")
        if not far <= 1:
            wrong += 1
            print(f"{name}: DIFFERS")
    return wrong + (arm.keys() != here.keys())


def main() -> int:
    parser = argparse.ArgumentParser(description="The native kernels for 64-bit ARM, under QEMU.")
    parser.add_argument("--library", type=Path, help="a shared library for 64-bit ARM; default: built here")
    library = parser.parse_args().library
    missing = [
        f"{tool} (Debian: {package})" for tool, package in NEEDED.items() if shutil.which(tool) is None
    ]
    if missing or platform.machine() != "x86_64":
        print(f"skipped: this needs an x86-64 machine with {', '.join(missing) or 'Linux'}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        arm, here = Path(folder) / "arm", Path(folder) / "here"
        print("building for 64-bit ARM and for this machine", flush=True)
        linked = ["-static"] if library is None else []
        build("aarch64-linux-gnu-gcc", arm, *linked, library=library and library.resolve())
        build("gcc", here)
        print("running both; the first under QEMU", flush=True)
        wrong = compare(results_of("qemu-aarch64", "-L", ARM_ROOT, str(arm)), results_of(str(here)))
    print(f"{wrong} results differ" if wrong else "all results agree")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
