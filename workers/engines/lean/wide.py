"""A second forward pass for leased cores, of several threads, made when it is first wanted.

Owns when it is made. A session of ONNX Runtime has the threads that it was made with, and those of one made before a
fork are lost in it; so this one is made in the worker, in a thread of its own, while batches go on with one thread.
Called by `vecd.workers.engines.lean.engine`.
"""

import logging
import threading
from collections.abc import Callable
from typing import TypeAlias

from vecd.shm.card import one_line
from vecd.shm.tasks import NoTasks, naming_limit
from vecd.workers.engines.lean.export import ExportForward
from vecd.workers.engines.lean.forward import LeanForward
from vecd.workers.memory import available_mb

Forward: TypeAlias = LeanForward | ExportForward

log = logging.getLogger("vecd.worker")

_MIN_FREE = 3
"""Memory that must be available, as a multiple of what stays in use: while it is made, there are up to two copies."""


class WideForward:
    def __init__(self, make: Callable[[], Forward], num_threads: int, num_bytes: int) -> None:
        """`make` is called in another thread, once at most; what it makes has `num_threads` threads and needs
        `num_bytes` of memory for its weights."""
        self.num_threads = num_threads
        self._make = make
        self._num_bytes = num_bytes
        self._made: Forward | None = None
        self._was_wanted = False

    def get(self) -> Forward | None:
        """None until it has been made; the first call begins that. None for ever if memory is short or it cannot be
        made, which is logged once."""
        if not self._was_wanted:
            self._was_wanted = True
            free_mb, needed_mb = available_mb(), _MIN_FREE * self._num_bytes >> 20
            if free_mb < needed_mb:
                log.warning("batches keep to one thread: %d MB of memory are available, not %d", free_mb, needed_mb)
            else:
                try:
                    with naming_limit():
                        threading.Thread(target=self._make_it, name="wide-session", daemon=True).start()
                except NoTasks as error:
                    log.warning("batches keep to one thread: %s", error)
        return self._made

    def _make_it(self) -> None:
        try:
            self._made = self._make()
        except Exception as error:  # the library's errors have no other base
            log.warning("batches keep to one thread: a session of %d: %s", self.num_threads, one_line(error))
