"""How fast an engine is in one worker, and what memory the worker needs for itself.

Owns the batches that it is measured with and the clock. Knows nothing of other workers or dtypes: who measures what in
turns with what is `vecd.launch.check.measure`'s. Called by `vecd.workers.check.orders`, in a process forked for it.
"""

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vecd.shm.card import ModelCard
from vecd.workers.engine import Engine, PackedBatch


class Turn:
    """Batches of the same lengths, one after the other. Side effect of making one: the engine has run the first."""

    def __init__(self, engine: Engine, card: ModelCard, lengths: list[int]) -> None:
        """Random ids of the vocabulary: the words matter to no engine's speed."""
        self._engine = engine
        token_ids = np.random.default_rng(seed=0).integers(0, card.vocab_size, sum(lengths), dtype=np.int32)
        self._batch = PackedBatch(np.array(lengths, dtype=np.int32), token_ids)
        self._rows = np.zeros((len(lengths), card.dim), dtype=np.float32)
        _forget_peak()
        engine.embed(self._batch, self._rows)

    def run(self, turn_s: float) -> dict[str, Any]:
        """At least one batch, and no other once `turn_s` have passed."""
        num_batches, elapsed_s, started_at, processor_s = 0, 0.0, time.perf_counter(), time.process_time()
        while elapsed_s < turn_s:
            self._engine.embed(self._batch, self._rows)
            num_batches += 1
            elapsed_s = time.perf_counter() - started_at
        return {
            "tokens_per_s": num_batches * self._batch.token_ids.size / elapsed_s,
            # Below 1 where others wanted the core, too.
            "core_share": (time.process_time() - processor_s) / elapsed_s,
            "private_mb": _peak_private_mb(),
        }


def pss_mb() -> int:
    """This process's memory, a page that several processes share counted as a part."""
    return _kilobytes(Path("/proc/self/smaps_rollup"), "Pss") // 1024


def _forget_peak() -> None:
    # Linux, Documentation/filesystems/proc.rst: 5 resets the high-water mark of resident memory.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_private_mb() -> int:
    """The most memory that was written by this process alone: what it has now, and what it has given back since."""
    status = Path("/proc/self/status")
    given_back = max(0, _kilobytes(status, "VmHWM") - _kilobytes(status, "VmRSS"))
    return (_kilobytes(Path("/proc/self/smaps_rollup"), "Private_Dirty") + given_back) // 1024


def _kilobytes(path: Path, name: str) -> int:
    """0 where the kernel does not say."""
    try:
        text = path.read_text()
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) if found else 0
