"""The machine, as far as it decides how a model is best served: cores, quotas, instruction sets, memory, GPUs.

Owns the reading of /proc and /sys for `vecd check`. Every source may be missing, as in containers and on other
architectures; then the figure is the next best. Starts nothing, and does not touch CUDA. Called by
`vecd.launch.check.command`.
"""

import os
import platform
import re
from contextlib import suppress
from pathlib import Path

from vecd.launch.check.report import Machine
from vecd.launch.config.plan import num_visible_gpus
from vecd.workers.processor import cgroup_quota, usable_cores

FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX512-VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX-BF16",
    "amx_int8": "AMX-INT8",
    "asimd": "NEON",
    "bf16": "BF16",
    "i8mm": "I8MM",
    "sve": "SVE",
}
"""The kernel's names, x86's and Arm's, and those that people know."""

_NO_LIMIT_MB = 1 << 33
"""What version 1 of cgroups says for none is beyond this."""


def read_machine(root: Path = Path("/")) -> Machine:
    """`root`: where /proc and /sys are."""
    cpuinfo = _text(root / "proc/cpuinfo")
    memory = _text(root / "proc/meminfo")
    limit_mb, used_mb = _cgroup_memory(root)
    available_mb = _meminfo_mb(memory, "MemAvailable")
    if limit_mb is not None:
        available_mb = min(available_mb, max(0, limit_mb - used_mb))
    cgroups = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    usable = usable_cores(*cgroups)
    return Machine(
        processor=_field(cpuinfo, "model name") or platform.processor() or platform.machine(),
        num_cores=os.cpu_count() or usable,
        num_usable_cores=usable,
        num_usable_physical_cores=min(usable, _num_physical(os.sched_getaffinity(0), root)),
        quota_cores=cgroup_quota(*cgroups),
        flags=_flags(_field(cpuinfo, "(?:flags|Features)")),
        memory_mb=_meminfo_mb(memory, "MemTotal"),
        available_mb=available_mb,
        memory_limit_mb=limit_mb,
        gpus=_gpus(root),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _field(cpuinfo: str, name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else ""


def _flags(names: str) -> tuple[str, ...]:
    present = set(names.split())
    return tuple(flag for flag in FLAGS if flag in present)


def _meminfo_mb(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) // 1024 if found else 0


def _num_physical(cores: set[int], root: Path) -> int:
    """How many of these logical cores there are when siblings count once."""
    siblings = {
        _text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") or core for core in cores
    }
    return len(siblings)


def _cgroup_memory(root: Path) -> tuple[int | None, int]:
    """The tightest limit of this process's cgroup and those above it, and what is used of it, in MB."""
    found: list[tuple[int, int]] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path may be the host's: the mount's root is then the group.
        while group != base and base in group.parents:
            found += _limit(group, names)
            group = group.parent
        found += _limit(base, names)
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _limit(group: Path, names: tuple[str, str]) -> list[tuple[int, int]]:
    """Nothing without a limit. What is kept of files counts as used, though the kernel would give it up."""
    with suppress(OSError, ValueError):
        limit_mb, used_mb = (int((group / name).read_text()) >> 20 for name in names)
        reclaimable = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
        if limit_mb < _NO_LIMIT_MB:
            return [(limit_mb, used_mb - (int(reclaimable[1]) >> 20 if reclaimable else 0))]
    return []


def _gpus(root: Path) -> tuple[str, ...]:
    """Of those that are visible to this process, the names, as far as the driver tells them."""
    names = [
        _field(_text(path), "Model") or "GPU"
        for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    ]
    count = num_visible_gpus()
    return tuple((names + ["GPU"] * count)[:count])
