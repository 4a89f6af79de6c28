"""What each model needs: remembered from an earlier start, or predicted.

Owns the files in the cache directory. A footprint holds for one set of model files, one configuration of its workers,
one version of vecd and one processor; anything else is another file. A wrong one is never a wrong vector. Called by
`vecd.launch.memory.budget`, `vecd.supervisor` and `vecd.launch.processes.residency`.

    <cache directory>/memory/<key>.json     {"shared": …, "per_worker": …}, in bytes, written by a rename
"""

import hashlib
import json
import logging
import platform
from importlib import metadata
from pathlib import Path

from vecd.launch.config.plan import Plan
from vecd.launch.memory.footprint import Footprint, predict
from vecd.shm.card import ModelError
from vecd.workers.json_file import write_json
from vecd.workers.processor import cpuinfo

log = logging.getLogger("vecd.supervisor")

_FORMAT = 1
_MAX_FILE_BYTES = 1000
_MAX_NBYTES = 2**50


class MemoryBook:
    def __init__(self, budget: int | None, folder: Path, server_nbytes: int = 0, *, is_only_model: bool = True) -> None:
        """`budget`: bytes for all processes of the server; None: no limit. `folder`: the cache directory.
        `server_nbytes`: what processes need that belong to no model. `is_only_model`: the server has no other."""
        self.budget = budget
        self.server_nbytes = server_nbytes
        self._is_only_model = is_only_model
        self._folder = folder / "memory"
        self._known: dict[str, Footprint] = {}

    def expect(self, plan: Plan) -> Footprint:
        """What the processes of `plan` will need: as remembered, else as predicted. Weights that have vanished count
        with the size that they had. Reads the file system: not for an event loop."""
        return self.recall(plan) or self._predict(plan)

    def adopt(self, newer: "MemoryBook") -> None:
        """From now on the server has the models that `newer` was made for. The budget stays."""
        self.server_nbytes, self._is_only_model = newer.server_nbytes, newer._is_only_model

    def recall(self, plan: Plan) -> Footprint | None:
        """As measured earlier; None if that is not known. Reads the file system."""
        key = self._key(plan)
        if key not in self._known:
            found = _read(self._folder / f"{key}.json", len(plan.workers))
            if found is None:
                return None
            self._known[key] = found
        return self._known[key]

    def remember(self, plan: Plan, footprint: Footprint) -> None:
        """Keep what was measured, and write it to the cache. If that fails, it is known until the server ends. Writes a
        file: not for an event loop."""
        key = self._key(plan)
        self._known[key] = footprint
        try:
            write_json(self._folder / f"{key}.json", {"shared": footprint.shared, "per_worker": footprint.per_worker})
        except OSError as error:
            log.warning("the memory that %s needs cannot be remembered: %s", plan.gateway.model, error)

    def _predict(self, plan: Plan) -> Footprint:
        try:
            return predict(plan, is_only_model=self._is_only_model)
        except ModelError as error:  # the load reports it
            log.warning("the memory that %s needs is not known: %s", plan.gateway.model, error)
            return Footprint(2 * plan.card.weights_bytes, 0, len(plan.workers))

    def _key(self, plan: Plan) -> str:
        config = plan.workers[0]
        conditions = {
            "format": _FORMAT,
            "version": metadata.version("vecd"),
            "files": sorted(plan.model_files),
            "requested": [config.engine, config.dtype, config.device.partition(":")[0], plan.settings.kind],
            "workers": [len(plan.workers), config.num_threads, config.max_threads, self._is_only_model],
            "batches": [plan.gateway.max_batch_tokens, plan.gateway.arena.nbytes],
            "processor": cpuinfo("model name") or platform.processor(),
        }
        return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:32]


def _read(path: Path, num_workers: int) -> Footprint | None:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_FILE_BYTES))
        sizes = found["shared"], found["per_worker"]
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return None
    if not all(type(size) is int and 0 < size < _MAX_NBYTES for size in sizes):
        return None
    return Footprint(*sizes, num_workers)
