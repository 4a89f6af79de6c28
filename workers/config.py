"""The configuration of a worker, and the number of processor cores that this process may use.

Owns `WorkerConfig`, composed by the supervisor and sent to the fork server as JSON. Reads no environment variable, and
no file except the kernel's accounting of processors. Imports neither torch nor numpy, because the supervisor imports
it.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vecd.shm.arena import ArenaSpec
from vecd.shm.card import ModelCard


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything a worker needs to know; equal for all workers except `device`."""

    card: ModelCard
    arena: ArenaSpec
    engine: str
    """"fused", "packed" or "padded"; "auto": the fastest of these whose vectors are the reference model's within bounds;
    "dummy", or its old name "weightless": no model, vectors made from the token ids alone for tests."""
    device: str
    """"cpu", or "cuda:0", "cuda:1", …"""
    dtype: str
    """"auto", "float32", "bfloat16", "float16" or "int8"."""
    num_threads: int
    """Threads of one forward pass."""
    log_level: str
    cache_folder: str
    """The cache directory for the selection of an engine; empty for none."""
    log_format: str = "text"
    """A format of `vecd.shm.logs`."""

    @property
    def is_dummy(self) -> bool:
        return self.engine in ("dummy", "weightless")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "WorkerConfig":
        return cls(**{**fields, "card": ModelCard.from_json(fields["card"]), "arena": ArenaSpec(**fields["arena"])})


def usable_cores(cgroup_root: Path = Path("/sys/fs/cgroup"), proc_cgroup: Path = Path("/proc/self/cgroup")) -> int:
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
    try:
        memberships = [line.split(":", 2) for line in proc_cgroup.read_text().splitlines()]
    except OSError:
        return None
    quotas: list[float] = []
    for _hierarchy, controllers, path in memberships:
        if controllers == "":  # version 2
            read, base = _quota_v2, cgroup_root
        elif "cpu" in controllers.split(","):  # version 1
            read, base = _quota_v1, cgroup_root / "cpu"
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path may be the host's and not exist here; the mount's root is then the group.
        candidates = [group, *group.parents] if group.is_dir() else [base]
        for folder in candidates:
            if base != folder and base not in folder.parents:
                break
            quota = read(folder)
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


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
