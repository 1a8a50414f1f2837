"""What this machine can do for models: who computes, with what instructions, in how much memory, and what fits there.

Finds facts; `doctor` prints them. Loads no model.
"""

import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from headlong.checkpoint import source
from headlong.env import available_cores, available_memory, native_ops_wanted
from headlong.ops import native
from headlong.ops.registry import NO_LIBRARY

COMPILERS = ("cc", "gcc", "clang")
INSTRUCTIONS = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
"""The instructions with which a kernel of ours, or of torch's, is faster."""
CAPABILITY = (8, 0)
"""The least compute capability that the Triton kernels were made for."""
KNOWN = {
    "Qwen/Qwen3.5-0.8B": 1.8e9,
    "Qwen/Qwen3.5-2B": 4.6e9,
    "Qwen/Qwen3.5-4B": 9.3e9,
    "Qwen/Qwen3.5-9B": 19.3e9,
    "Qwen/Qwen3.5-27B": 55.6e9,
    "Qwen/Qwen3.5-35B-A3B": 71.9e9,
    "Qwen/Qwen3.5-122B-A10B": 250e9,
}
"""Bytes of well-known models with an MTP head in bfloat16, about: whole repositories, vision included."""
OVERHEAD = 1.1
"""How much memory a model takes at least, as a multiple of its weights: rows, pages and workspace."""


@dataclass(frozen=True)
class Finding:
    """One fact about the machine. `advice` says what to do where something is missing; None where nothing is."""

    name: str
    found: str
    advice: str | None = None


@dataclass(frozen=True)
class Fit:
    """A model, what it needs about, and whether that is there."""

    name: str
    nbytes: int
    local: bool
    fits: bool | None
    """None where nobody knows how much memory there is."""


def findings() -> list[Finding]:
    return [
        Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("PyTorch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        Finding("cores", str(available_cores())),
        Finding("instructions", ", ".join(instructions()) or "unknown"),
        _kernels(),
        _compiler(),
        _gpu(),
        _triton(),
        _memory(),
    ]


def fits() -> list[Fit]:
    """The models on this machine, then well-known ones, against the memory that is free where they would serve."""
    free = free_memory()
    local = {model.name: model.nbytes for model in source.list_local()}
    known = {name: int(nbytes) for name, nbytes in KNOWN.items() if name not in local}
    return [
        Fit(name, nbytes, name in local, None if free is None else nbytes * OVERHEAD <= free)
        for name, nbytes in (local | known).items()
    ]


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a model may still take: of the GPU where there is one, else of this machine or its cgroup."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    bounds = [bound] if (bound := available_memory(root)) is not None else []
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    bounds += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(bounds, default=None)


def instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The vector instructions that the CPU has, of those that matter here."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [torch.backends.cpu.get_cpu_capability().lower()]
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    return [name for name in INSTRUCTIONS if name in flags]


def _kernels() -> Finding:
    if not native_ops_wanted():
        return Finding("native kernels", "turned off", "unset HEADLONG_NATIVE to use them")
    if native.library() is None:
        stale = native.staleness()
        return Finding("native kernels", "stale" if stale else "not built", stale or NO_LIBRARY)
    return Finding("native kernels", "serve on the CPU")


def _compiler() -> Finding:
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None and native.library() is None:
        return Finding("C compiler", "none", "native kernels are built with one at install: install gcc")
    return Finding("C compiler", found or "none; the kernels are there already")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        return Finding("GPU", "none that PyTorch sees" if built else "none; PyTorch was built for CPUs")
    capability = torch.cuda.get_device_capability()
    found = f"{torch.cuda.get_device_name()}, compute capability {'.'.join(map(str, capability))}"
    if capability < CAPABILITY:
        return Finding("GPU", found, "the Triton kernels need 8.0 or newer")
    return Finding("GPU", found)


def _triton() -> Finding:
    try:
        found = version("triton")
    except PackageNotFoundError:
        missing = torch.cuda.is_available()
        return Finding(
            "Triton", "not installed", "`pip install triton`: GPUs are slow without" if missing else None
        )
    return Finding("Triton", found if torch.cuda.is_available() else f"{found}, idle without a GPU")


def _memory() -> Finding:
    free = free_memory()
    where = "of the GPU" if torch.cuda.is_available() else "of this machine"
    return Finding("free memory", "unknown" if free is None else f"{free / 1e9:.1f} GB {where}")
