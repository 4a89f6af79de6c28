"""The memory of the machine and of this process's cgroup, as the kernel reports it.

Owns the reading of /proc/meminfo and of the memory controller. Called by `vecd.workers.engines.lean.wide`,
`vecd.launch.check.machine` and `vecd.launch.memory.budget`. Linux only; every source may be missing, as in some
containers.
"""

import re
from contextlib import suppress
from pathlib import Path

from vecd.workers.processor import cgroups, line_of

_NO_LIMIT_MB = 1 << 33
"""Version 1 of cgroups reports a larger number than this for no limit."""


def available_mb(root: Path = Path("/")) -> int:
    """Memory that can be used without swapping, in MB: of the machine, and of the cgroup if it has a limit; 0 if the
    kernel does not say. `root`: the folder that contains /proc and /sys."""
    in_kilobytes = line_of(root / "proc/meminfo", "MemAvailable").split()
    of_machine = int(in_kilobytes[0]) >> 10 if in_kilobytes else 0
    limit_mb, used_mb = cgroup_memory_mb(root)
    return of_machine if limit_mb is None else min(of_machine, max(0, limit_mb - used_mb))


def cgroup_memory_mb(root: Path = Path("/")) -> tuple[int | None, int]:
    """The tightest memory limit of this process's cgroup and its ancestors, and the memory used of it, in MB. Cached
    files count as free, because the kernel drops them when needed."""
    return min(_cgroup_limits(root), key=lambda pair: pair[0] - pair[1], default=(None, 0))


def memory_limit_mb(root: Path = Path("/")) -> int:
    """The most memory that this process and all others of its cgroup can have, in MB: the machine's, or less if the
    cgroup or one of its ancestors has a limit; 0 if the kernel does not say."""
    in_kilobytes = line_of(root / "proc/meminfo", "MemTotal").split()
    of_machine = [int(in_kilobytes[0]) >> 10] if in_kilobytes else []
    return min([*of_machine, *(limit_mb for limit_mb, _ in _cgroup_limits(root))], default=0)


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """The limit of each group that has one, and the memory used of it, in MB."""
    found: list[tuple[int, int]] = []
    for group, is_v2 in cgroups("memory", root / "sys/fs/cgroup", root / "proc/self/cgroup"):
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        with suppress(OSError, ValueError):  # no limit
            limit_mb, used_mb = (int((group / name).read_text()) >> 20 for name in names)
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
            if limit_mb < _NO_LIMIT_MB:
                found.append((limit_mb, used_mb - (int(cached[1]) >> 20 if cached else 0)))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
