"""How many cores and bytes a process may use: affinity, memory, and the quotas of cgroups of both versions, on made-up
trees."""

import os
from pathlib import Path

import pytest

from headlong import env

CORES = 64


@pytest.fixture(autouse=True)
def affinity(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)), raising=False)


def tree(root: Path, memberships: str, files: dict[str, str]) -> Path:
    """A root with /proc/self/cgroup and files under /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(memberships)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


def test_without_cgroups(tmp_path):
    assert env.available_cores(tmp_path) == CORES


def test_affinity_may_be_the_least(tmp_path, monkeypatch):
    root = tree(tmp_path, "0::/\n", {"cpu.max": "800000 100000\n"})
    assert env.available_cores(root) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 7})
    assert env.available_cores(root) == 2


@pytest.mark.parametrize(("count", "cores"), [(6, 6), (None, 1)])
def test_where_there_is_no_affinity(tmp_path, monkeypatch, count, cores):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert env.available_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),  # a part of a core counts as one
        ("50000 100000", 1),
        ("1000 1000000", 1),
        ("210000 50000", 5),
        ("9900000 100000", CORES),  # more than there are
        ("max 100000", CORES),
        ("", CORES),
        ("200000", CORES),
        ("200000 0", CORES),
        ("-5 100000", CORES),
        ("nonsense 100000", CORES),
    ],
)
def test_version_2(tmp_path, limit, cores):
    assert env.available_cores(tree(tmp_path, "0::/\n", {"cpu.max": f"{limit}\n"})) == cores


def test_an_ancestor_limits_too(tmp_path):
    files = {
        "a.slice/cpu.max": "300000 100000",
        "a.slice/b.scope/cpu.max": "max 100000",
        "a.slice/other/cpu.max": "100000 100000",
    }
    assert env.available_cores(tree(tmp_path, "0::/a.slice/b.scope\n", files)) == 3
    (tmp_path / "sys/fs/cgroup/a.slice/b.scope/cpu.max").write_text("250000 125000")
    assert env.available_cores(tmp_path) == 2


@pytest.mark.parametrize("path", ["/kubepods/pod1/0f3c", "/../../elsewhere"])
def test_a_path_that_is_the_host_s(tmp_path, path):
    files = {"cpu.max": "400000 100000", "elsewhere/cpu.max": "100000 100000"}
    assert env.available_cores(tree(tmp_path, f"0::{path}\n", files)) == 4


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cores"), [(250_000, 3), (-1, CORES), (20_000, 1)])
def test_version_1(tmp_path, mount, quota, cores):
    memberships = "9:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n3:cpuset:/docker/1\n"
    files = v1(f"{mount}/docker/1", quota) | v1("memory/docker/1", 100_000)
    assert env.available_cores(tree(tmp_path, memberships, files)) == cores


def test_version_1_in_a_container(tmp_path):
    """The path is the host's, the mount is the container's own cgroup."""
    assert env.available_cores(tree(tmp_path, "4:cpu,cpuacct:/docker/1\n", v1("cpu", 500_000))) == 5


def test_both_versions(tmp_path):
    files = v1("cpu/a", 700_000) | {"unified/a/cpu.max": "600000 100000"}
    assert env.available_cores(tree(tmp_path, "1:cpu:/a\n0::/a\n", files)) == 6


def test_lines_that_are_none(tmp_path):
    assert env.available_cores(tree(tmp_path, "\n0\n::\n4:cpu\n0::\n", {"cpu.max": "200000 100000"})) == 2


def test_this_machine(monkeypatch):
    monkeypatch.undo()
    assert 1 <= env.available_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("memberships", "files", "expected"),
    [
        ("", {}, 4 << 30),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1073741824\n"}, 1 << 30),
        ("0::/a\n", {"a/memory.max": "9999999999999\n"}, 4 << 30),  # more than there is
        ("3:memory:/x\n", {"memory/x/memory.limit_in_bytes": "2147483648\n"}, 2 << 30),
        ("3:cpu,memory:/gone\n", {"memory/memory.limit_in_bytes": "123456\n"}, 123456),
        ("0::/../other\n", {"memory.max": "77\n"}, 77),
        ("0::/\n", {"memory.max": "lots\n"}, 4 << 30),
    ],
)
def test_memory(tmp_path, memberships, files, expected):
    root = tree(tmp_path, memberships, files)
    (root / "proc/meminfo").write_text("MemTotal:        4194304 kB\nMemFree: 1 kB\n")
    assert env.available_memory(root) == expected


def test_memory_that_nobody_tells(tmp_path):
    assert env.available_memory(tmp_path) is None
