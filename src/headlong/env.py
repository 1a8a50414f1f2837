"""Every environment variable Headlong reads, and the cores and memory it may use. A value that cannot be parsed is an
error, not a default.

HEADLONG_NATIVE, HEADLONG_TRITON, HEADLONG_CONFIG, XDG_CACHE_HOME and whether OpenTelemetry is told where to send spans
have their functions here (its libraries and Hugging Face's read their own); every setting of the server has a variable
too, named after its field, which `server/settings_sources.py` reads through `settings_given`. Cores are counted from
what the kernel tells a process of itself, and so is memory; how many threads to start is not decided here.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from headlong.errors import ConfigError

PREFIX = "HEADLONG_"


def native_ops_wanted() -> bool:
    """HEADLONG_NATIVE: 1 (default) uses the compiled CPU kernels where they were built, 0 never does."""
    return _native() != "0"


def native_library() -> Path | None:
    """HEADLONG_NATIVE may also be the path of a library that was built otherwise, in place of the installed one."""
    value = _native()
    return None if value in ("0", "1") else Path(value).resolve()


def triton_ops_wanted(device_type: str) -> bool:
    """HEADLONG_TRITON: 1 (default) uses Triton's kernels on CUDA devices, 0 nowhere; `interpret` also on the CPU, where
    Triton's interpreter runs them (TRITON_INTERPRET=1): slow, for tests."""
    value = os.environ.get("HEADLONG_TRITON", "1")
    if value not in ("0", "1", "interpret"):
        raise ConfigError(f"HEADLONG_TRITON must be 0, 1 or interpret, not {value!r}")
    return value != "0" if device_type == "cuda" else value == "interpret"


def wait_passively() -> None:
    """Lets the threads of torch's own operations sleep while they wait for each other, unless the environment says how
    they wait: spinning, they take the cores that another server's threads need to come to the same point. OpenMP reads
    it once, when torch is imported."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    if not any(name in os.environ for name in names):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def config_file() -> str | None:
    """HEADLONG_CONFIG: the server's config.yml; without it none is read."""
    return os.environ.get("HEADLONG_CONFIG")


def traces_endpoint() -> str | None:
    """The name of the variable that says where spans are sent, of OpenTelemetry's own; None where neither is set."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next((name for name in names if os.environ.get(name)), None)


def cache_folder() -> Path:
    """XDG_CACHE_HOME, by default ~/.cache: a folder in it keeps what was fetched, measured or counted once."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headlong"
    except RuntimeError as error:
        raise ConfigError(
            "there is no place to keep files in: this user has no home folder; set XDG_CACHE_HOME to a folder"
        ) from error


def settings_given() -> dict[str, str]:
    """Returns every other HEADLONG_ variable that is set, by its whole name."""
    own = ("HEADLONG_NATIVE", "HEADLONG_TRITON", "HEADLONG_CONFIG")
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX) and name not in own}


def available_cores(root: Path = Path("/")) -> int:
    """How many cores this process may keep busy: its affinity, or less where a cgroup's quota says so.

    A quota counts rounded up: one and a half cores are worth a second thread. `root` is where /proc and /sys are.
    """
    # Windows and macOS have no affinity to ask for.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_quotas(root)]))


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes this process may use at most: the machine's memory, or less where a cgroup says so; None where neither
    tells. `root` is where /proc and /sys are."""
    words = _words(root / "proc/meminfo")
    bounds = [int(words[1]) * 1024] if words[:1] == ["MemTotal:"] and words[1].isdecimal() else []
    for hierarchy, controllers, path in _memberships(root / "proc/self/cgroup"):
        mounts = root / "sys/fs/cgroup"
        if hierarchy == "0":
            folders, name = (*_upwards(mounts, path), *_upwards(mounts / "unified", path)), "memory.max"
        elif "memory" in controllers.split(","):
            folders, name = _upwards(mounts / "memory", path), "memory.limit_in_bytes"
        else:
            continue
        found = (_words(folder / name) for folder in folders)
        bounds += [int(word) for words in found for word in words[:1] if word.isdecimal()]
    return min(bounds, default=None)


def _quotas(root: Path) -> Iterator[int]:
    """Cores that the cgroups of this process and those above them allow, where they limit it."""
    for hierarchy, controllers, path in _memberships(root / "proc/self/cgroup"):
        mounts = root / "sys/fs/cgroup"
        if hierarchy == "0":  # version 2; where version 1 has the controllers it is mounted one level down
            for folder in (*_upwards(mounts, path), *_upwards(mounts / "unified", path)):
                yield from _cores(_words(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for folder in (*_upwards(mounts / controllers, path), *_upwards(mounts / "cpu", path)):
                yield from _cores(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))


def _memberships(file: Path) -> Iterator[tuple[str, str, str]]:
    """Returns (hierarchy, controllers, path) of every cgroup this process is in."""
    try:
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield hierarchy, controllers, path


def _upwards(mount: Path, path: str) -> list[Path]:
    """Yields a cgroup's folder and all above it, up to the mount. In a container the path may be the host's and not
    exist here, or begin with `..`; the mount itself is then the container's own cgroup."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return []


def _cores(words: list[str]) -> list[int]:
    """Returns [cores] for a quota and its period in microseconds, or [] where there is no limit (`max`, -1) or no such
    pair."""
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return []
    quota, period = map(int, words)
    return [max(1, -(-quota // period))] if period else []


def _native() -> str:
    value = os.environ.get("HEADLONG_NATIVE", "1")
    if value not in ("0", "1") and not Path(value).is_file():
        raise ConfigError(
            f"environment variable HEADLONG_NATIVE must be 0, 1 or a library's file, not {value!r}"
        )
    return value
