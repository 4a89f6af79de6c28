"""Cores and available memory, from files laid out as the kernel's."""

import os
from pathlib import Path

import pytest

from vecd.workers.machine import available_mb, usable_cores

CORES = len(os.sched_getaffinity(0))


def cores(root: Path, membership: str) -> int:
    proc = root / "proc-cgroup"
    proc.write_text(membership)
    return usable_cores(root, proc)


@pytest.mark.parametrize(
    ("groups", "membership", "expected"),
    [
        ({}, "/", CORES),
        ({"a": "100000 100000"}, "/a", 1),
        ({"a": "50000 100000"}, "/a", 1),
        ({"a": "max 100000"}, "/a", CORES),
        ({"a/b": "max 100000", "a": "100000 100000"}, "/a/b", 1),  # the tightest of the ancestors counts
        ({"": "100000 100000"}, "/docker/of-the-host", 1),  # in a container the mount's root is the group
    ],
)
def test_version_2_quota(tmp_path: Path, groups: dict[str, str], membership: str, expected: int) -> None:
    for group, cpu_max in groups.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(cpu_max)
    assert cores(tmp_path, f"0::{membership}\n") == expected


@pytest.mark.parametrize(("quota_us", "expected"), [("100000", 1), ("-1", CORES)])
def test_version_1_quota(tmp_path: Path, quota_us: str, expected: int) -> None:
    group = tmp_path / "cpu" / "docker" / "x"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(quota_us)
    (group / "cpu.cfs_period_us").write_text("100000")
    assert cores(tmp_path, "5:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n") == expected


_MEMINFO = "MemTotal:       16384000 kB\nMemAvailable:    8192000 kB\n"


def test_what_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "missing") == CORES
    assert available_mb(tmp_path) == 0


def test_the_less_of_the_machine_s_and_the_cgroup_s_memory_counts(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/vecd"
    for folder in (group, tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(_MEMINFO)
    (tmp_path / "proc/self/cgroup").write_text("0::/vecd\n")
    assert available_mb(tmp_path) == 8000
    (group / "memory.max").write_text(str(1000 << 20))
    (group / "memory.current").write_text(str(900 << 20))
    assert available_mb(tmp_path) == 100
    (group / "memory.stat").write_text(f"inactive_file {300 << 20}\n")
    assert available_mb(tmp_path) == 400
    (group / "memory.current").write_text(str(1500 << 20))
    assert available_mb(tmp_path) == 0
