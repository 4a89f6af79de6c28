"""The processor, as the kernel describes it: the cores that this process may use, and the instruction sets.

Owns the reading of cgroups and of /proc/cpuinfo. Imports neither torch nor numpy, because the supervisor imports it.
Linux only; every source may be missing, as in some containers.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUP_ROOT, _PROC_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(cgroup_root: Path = _CGROUP_ROOT, proc_cgroup: Path = _PROC_CGROUP) -> int:
    """The processor cores that this process may use: those of its affinity mask, limited by its cgroup's quota; at
    least 1.

    A container with a quota of 2 of 64 processors sees all 64 in its affinity mask; more workers than the quota only
    throttle each other. A fractional quota is rounded up.
    """
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota(cgroup_root, proc_cgroup)
    return max(1, min(cores, math.ceil(quota)) if quota is not None else cores)


def cgroup_quota(cgroup_root: Path, proc_cgroup: Path) -> float | None:
    """The tightest CPU quota of this process's cgroup and its ancestors, in cores; None without one."""
    groups = cgroups("cpu", cgroup_root, proc_cgroup)
    quotas = [_quota_v2(group) if is_v2 else _quota_v1(group) for group, is_v2 in groups]
    return min((quota for quota in quotas if quota is not None), default=None)


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


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def cpuinfo(name: str, root: Path = Path("/")) -> str:
    """The first processor's line in /proc/cpuinfo with this name, a regular expression; empty if there is none."""
    return line_of(root / "proc/cpuinfo", name)


def line_of(path: Path, name: str) -> str:
    """The text of the first line "name: text" of a file in /proc; empty if there is none. `name`: a regular
    expression."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^(?:{name})\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """The instruction sets and other features of the processor, by the kernel's names."""
    return frozenset(cpuinfo("flags|Features", root).split())


@dataclass(frozen=True, slots=True)
class Processor:
    """What the choice of a number format needs to know of a processor."""

    flags: frozenset[str]
    """As of `cpu_flags`."""
    vendor: str
    """As in /proc/cpuinfo, for example "AuthenticAMD"."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether it has instructions for products of bfloat16."""
        return bool(self.flags & {"avx512_bf16", "amx_tile"})

    @property
    def is_fast_in_bfloat16(self) -> bool:
        """Whether these are known to be faster than those of float32. Intel's AVX512-BF16 has half the rate of
        float32."""
        return "amx_tile" in self.flags or ("avx512_bf16" in self.flags and self.vendor == "AuthenticAMD")


def this_processor() -> Processor:
    return Processor(cpu_flags(), cpuinfo("vendor_id"))


def has_vnni() -> bool:
    """Whether the processor has instructions that add products of int8 in 32 bits."""
    return bool(cpu_flags() & {"avx512_vnni", "avx_vnni"})
