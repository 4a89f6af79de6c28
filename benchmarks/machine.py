"""What a measurement was made on: figures without this are not comparable with anything.

Owns the facts written beside every recorded run. Changes nothing. Called by `benchmarks.notebook` and
`benchmarks.findings`.
"""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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


def describe_machine() -> dict[str, Any]:
    """Facts that decide the figures, ready for JSON."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    """Of the repository this file is in; "+" when the tree differs from it."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
