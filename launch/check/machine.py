"""The facts of a machine that decide how a model is served best: cores, quotas, instruction sets, memory, GPUs.

Owns the reading of /proc and /sys for `vecd check`. A source may be missing, as in some containers; then the next best
figure is used. Starts nothing and does not use CUDA. Called by `vecd.launch.check.command`.
"""

import os
import platform
from pathlib import Path

from vecd.launch.check.report import Machine
from vecd.launch.config.plan import num_visible_gpus
from vecd.workers.memory import available_mb, cgroup_memory_mb
from vecd.workers.process.kernel import kilobytes
from vecd.workers.processor import cgroup_quota, cpu_flags, cpuinfo, line_of, usable_cores

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
"""The kernel's names of instruction sets, and their usual names."""


def read_machine(root: Path = Path("/")) -> Machine:
    """`root`: the folder that contains /proc and /sys."""
    places = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    usable = usable_cores(*places)
    flags = cpu_flags(root)
    return Machine(
        processor=cpuinfo("model name", root) or platform.machine(),
        num_cores=os.cpu_count() or usable,
        num_usable_cores=usable,
        num_usable_physical_cores=min(usable, _num_physical(os.sched_getaffinity(0), root)),
        quota_cores=cgroup_quota(*places),
        flags=tuple(flag for flag in FLAGS if flag in flags),
        memory_mb=kilobytes(root / "proc/meminfo", "MemTotal") // 1024,
        available_mb=available_mb(root),
        memory_limit_mb=cgroup_memory_mb(root)[0],
        gpus=_gpus(root),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _num_physical(cores: set[int], root: Path) -> int:
    """The number of physical cores among these logical ones."""
    folder = root / "sys/devices/system/cpu"
    return len({_text(folder / f"cpu{core}/topology/thread_siblings_list") or core for core in cores})


def _gpus(root: Path) -> tuple[str, ...]:
    """The names of the GPUs that this process can see, as far as the driver has them."""
    models = [line_of(path, "Model") for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    count = num_visible_gpus()
    return tuple(model or "GPU" for model in (models + [""] * count)[:count])
