import os

import pytest

from vecd.workers.processor import usable_cores

CORES = len(os.sched_getaffinity(0))


def cores(root, membership: str) -> int:
    proc = root / "proc-cgroup"
    proc.write_text(membership)
    return usable_cores(root, proc)


def test_without_a_quota_it_is_the_affinity(tmp_path):
    assert cores(tmp_path, "0::/\n") == CORES


@pytest.mark.parametrize(("cpu_max", "expected"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", CORES)])
def test_version_2_quota(tmp_path, cpu_max, expected):
    group = tmp_path / "system.slice" / "vecd.service"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(cpu_max)
    assert cores(tmp_path, "0::/system.slice/vecd.service\n") == expected


def test_the_tightest_of_the_ancestors_counts(tmp_path):
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000")
    (tmp_path / "a" / "cpu.max").write_text("100000 100000")
    assert cores(tmp_path, "0::/a/b\n") == 1


def test_in_a_container_the_mounts_root_is_the_group(tmp_path):
    (tmp_path / "cpu.max").write_text("100000 100000")
    assert cores(tmp_path, "0::/docker/of-the-host\n") == 1


def test_version_1_quota(tmp_path):
    group = tmp_path / "cpu" / "docker" / "x"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("100000")
    (group / "cpu.cfs_period_us").write_text("100000")
    assert cores(tmp_path, "5:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n") == 1


def test_a_machine_without_cgroups(tmp_path):
    assert usable_cores(tmp_path, tmp_path / "missing") == CORES
