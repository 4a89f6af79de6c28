"""What a measurement was made on: figures without this are not comparable with anything.

Owns the facts written beside every recorded run. Changes nothing. Called by `benchmarks.notebook` and
`benchmarks.findings`.
"""

import os
import platform
import subprocess
from collections.abc import Set
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vecd.workers.machine import cpu_flags

_CLASSES = (("AMX", "amx_tile"), ("AVX512-BF16", "avx512_bf16"), ("AVX-512", "avx512f"), ("AVX2", "avx2"))
"""A class of processors and the flag in /proc/cpuinfo that makes one, the fastest first."""
_PACKAGES = (
    "vecd",
    "torch",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "onnx",
    "onnxruntime",
    "openvino",
    "fastapi",
    "uvicorn",
    "gunicorn",
    "uvloop",
    "httptools",
    "numpy",
)


def num_cores() -> int:
    """Cores this process may use, which a container or taskset makes fewer than there are."""
    return len(os.sched_getaffinity(0))


def processor_class(flags: Set[str] | None = None) -> str:
    """The instructions that decide how fast products are: "AMX", "AVX512-BF16", "AVX-512" or "AVX2"; for another
    processor the machine's name. `flags`: as in /proc/cpuinfo; None for this machine's."""
    found = cpu_flags() if flags is None else flags
    return next((name for name, flag in _CLASSES if flag in found), platform.machine())


def describe_machine() -> dict[str, Any]:
    """Facts that decide the figures, ready for JSON."""
    return {
        "cpu": _cpu_model(),
        "class": processor_class(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit_of(Path(__file__).parent),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit_of(folder: Path) -> str | None:
    """Of the repository the folder is in; "+" when the tree differs from it."""
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
