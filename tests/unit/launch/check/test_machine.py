"""What is read of a machine, from files laid out as the kernel's."""

import os
from pathlib import Path

import pytest

from vecd.launch.check.machine import read_machine
from vecd.workers.memory import memory_limit_mb

_CPUINFO = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) 6975P-C
flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8 smep
"""
_MEMINFO = "MemTotal:       16384000 kB\nMemFree:         1024000 kB\nMemAvailable:    8192000 kB\n"


def root(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/cpuinfo": _CPUINFO, "proc/meminfo": _MEMINFO, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_machine_without_limits(tmp_path: Path) -> None:
    machine = read_machine(root(tmp_path, {}))
    assert machine.processor == "Intel(R) Xeon(R) 6975P-C"
    assert machine.flags == ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
    assert (machine.memory_mb, machine.available_mb, machine.memory_limit_mb) == (16_000, 8_000, None)
    assert machine.quota_cores is None
    assert machine.num_usable_cores == machine.num_usable_physical_cores == len(os.sched_getaffinity(0))


def test_limits_of_a_cgroup_and_of_those_above_it(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/system.slice"
    machine = read_machine(
        root(
            tmp_path,
            {
                "proc/self/cgroup": "0::/system.slice/vecd.service\n",
                f"{group}/vecd.service/cpu.max": "100000 100000\n",
                f"{group}/vecd.service/memory.max": "max\n",
                f"{group}/memory.max": str(4000 << 20),
                f"{group}/memory.current": str(1500 << 20),
                f"{group}/memory.stat": f"active_file 0\ninactive_file {500 << 20}\n",
            },
        )
    )
    assert (machine.quota_cores, machine.num_usable_cores) == (1.0, 1)
    assert (machine.memory_limit_mb, machine.available_mb) == (4000, 3000)


def test_two_threads_of_a_core_are_one_physical_core(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    everyone = ",".join(map(str, cores))
    topology = {f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list": everyone for core in cores}
    machine = read_machine(root(tmp_path, topology))
    assert (machine.num_usable_physical_cores, machine.num_usable_cores) == (1, len(cores))


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.num_usable_cores >= 1
    assert (machine.flags, machine.memory_mb, machine.available_mb) == ((), 0, 0)


@pytest.mark.parametrize(
    ("files", "limit_mb"),
    [
        ({}, 16_000),
        ({"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": str(4000 << 20)}, 4000),
        ({"sys/fs/cgroup/a/b/memory.max": str(3000 << 20), "sys/fs/cgroup/a/memory.max": str(4000 << 20)}, 3000),
        ({"sys/fs/cgroup/a/b/memory.max": str(30_000 << 20)}, 16_000),
        ({"sys/fs/cgroup/a/b/memory.max": "rubbish"}, 16_000),
        ({"proc/self/cgroup": "", "proc/meminfo": ""}, 0),
        (
            {
                "proc/self/cgroup": "4:memory:/a/b\n1:cpu:/\n0::/\n",
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(2000 << 20),
            },
            2000,
        ),
        ({"proc/self/cgroup": "4:memory:/elsewhere\n"}, 16_000),
    ],
)
def test_the_memory_that_all_may_have(files: dict[str, str], limit_mb: int, tmp_path: Path) -> None:
    in_use = {
        path.replace("limit_in_bytes", "usage_in_bytes").replace("memory.max", "memory.current"): "1000"
        for path in files
        if path.endswith(("memory.max", "memory.limit_in_bytes"))
    }
    folder = root(tmp_path, {"proc/self/cgroup": "0::/a/b\n", **in_use, **files})
    assert memory_limit_mb(folder) == limit_mb


def test_a_limit_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    folder = root(tmp_path, {"proc/self/cgroup": "0::/a\n"})
    (folder / "sys/fs/cgroup/a/memory.max").mkdir(parents=True)
    assert memory_limit_mb(folder) == 16_000
