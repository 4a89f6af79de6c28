"""The machine as the kernel describes it: cores, instruction sets, memory.

Imports neither torch nor numpy, because the supervisor imports it. Linux only; every source may be missing, as in some
containers.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CGROUP_ROOT, _PROC_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(cgroup_root: Path = _CGROUP_ROOT, proc_cgroup: Path = _PROC_CGROUP) -> int:
    """The cores that this process may use: those of its affinity mask, limited by its cgroup's quota, rounded up; at
    least 1. A container with a quota of 2 of 64 processors sees all 64 in its affinity mask."""
    quotas = (_quota(*group) for group in cgroups("cpu", cgroup_root, proc_cgroup))
    limits = [math.ceil(quota) for quota in quotas if quota is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *limits]))


def cgroups(controller: str, cgroup_root: Path, proc_cgroup: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's cgroup and its ancestors that have `controller` ("cpu" or "memory"), and whether
    each is of version 2."""
    try:
        memberships = [line.split(":", 2) for line in proc_cgroup.read_text().splitlines()]
    except OSError:
        return
    for _hierarchy, controllers, path in memberships:
        is_v2 = controllers == ""
        if not is_v2 and controller not in controllers.split(","):
            continue
        base = cgroup_root if is_v2 else cgroup_root / controller
        group = base / path.lstrip("/")
        # Inside a container the path may be the host's and not exist here; the mount's root is then the group.
        for folder in [group, *group.parents] if group.is_dir() else [base]:
            if folder == base or base in folder.parents:
                yield folder, is_v2


def _quota(folder: Path, is_v2: bool) -> float | None:
    names = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max"
        return None


def cpuinfo(name: str, root: Path = Path("/")) -> str:
    return line_of(root / "proc/cpuinfo", name)


def line_of(path: Path, name: str) -> str:
    """The text of the first line "name: text" of a file; empty if there is none. `name`: a regular expression."""
    found = re.search(rf"^(?:{name})\s*:\s*(.*)$", _text(path), re.MULTILINE)
    return found[1].strip() if found else ""


def kilobytes(path: Path, name: str) -> int:
    """The number in a line "name:  number kB" of a file in /proc; 0 if the kernel does not say."""
    return int((line_of(path, name).split() or ["0"])[0])


def private_memory_mb() -> int:
    """Memory written by this process alone; 0 if the kernel does not say. Weights mapped from a file are not
    included."""
    return kilobytes(Path("/proc/self/smaps_rollup"), "Private_Dirty") // 1024


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    return frozenset(cpuinfo("flags|Features", root).split())


@dataclass(frozen=True, slots=True)
class Processor:
    flags: frozenset[str]
    vendor: str
    """As in /proc/cpuinfo, for example "AuthenticAMD"."""

    @property
    def has_bfloat16(self) -> bool:
        return bool(self.flags & {"avx512_bf16", "amx_tile"})

    @property
    def is_fast_in_bfloat16(self) -> bool:
        """Whether products of bfloat16 are known to be faster than those of float32. Intel's AVX512-BF16 has half the
        rate of float32."""
        return "amx_tile" in self.flags or ("avx512_bf16" in self.flags and self.vendor == "AuthenticAMD")


def this_processor() -> Processor:
    return Processor(cpu_flags(), cpuinfo("vendor_id"))


def has_vnni() -> bool:
    return bool(cpu_flags() & {"avx512_vnni", "avx_vnni"})


# The memory of the machine and of this process's cgroup, as the kernel reports it.

_NO_LIMIT_MB = 1 << 33


def available_mb(root: Path = Path("/")) -> int:
    """Memory that can be used without swapping, in MB: of the machine, and of the cgroup if it has a limit; 0 if the
    kernel does not say. `root`: the folder that contains /proc and /sys."""
    of_machine = kilobytes(root / "proc/meminfo", "MemAvailable") >> 10
    return min([of_machine, *(max(0, limit_mb - used_mb) for limit_mb, used_mb in _cgroup_limits(root))])


def memory_limit_mb(root: Path = Path("/")) -> int:
    """In MB: the machine's memory, or less if the cgroup or one of its ancestors has a limit; 0 if the kernel does not
    say."""
    of_machine = kilobytes(root / "proc/meminfo", "MemTotal") >> 10
    limits = [limit_mb for limit_mb, _ in _cgroup_limits(root)]
    return min([of_machine, *limits] if of_machine else limits, default=0)


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """The memory limits of this process's cgroup and its ancestors, and the memory used of each, in MB. Cached files
    count as free, because the kernel drops them when needed."""
    found: list[tuple[int, int]] = []
    for group, is_v2 in cgroups("memory", root / "sys/fs/cgroup", root / "proc/self/cgroup"):
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        with suppress(OSError, ValueError):  # no limit
            limit_mb, used_mb = (int((group / name).read_text()) >> 20 for name in names)
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
            if limit_mb < _NO_LIMIT_MB:
                found.append((limit_mb, used_mb - (int(cached[1]) >> 20 if cached else 0)))
    return found
