"""The identities of the models that the server has: found out, tried again, and withdrawn.

Owns the one thread that reads all files, one after the other, so that many models do not wear a cold disk out, first
those of models that are loaded with the server. Sets `WorkerPool.identity`. What an identity is made of is in
`vecd.launch.config.identity`.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from vecd.base.tasks import naming_limit
from vecd.launch.config.identity import Digests, is_unchanged, read_identity
from vecd.launch.config.plan import Plan
from vecd.launch.files import FileAccess, FilesHang
from vecd.launch.workers import WorkerPool
from vecd.model.files import one_line
from vecd.shm.control import ModelIdentity

PAUSES_S = 2.0, 10.0, 60.0
"""Before each further try to read files."""
NUM_LOOKS, _LOOK_S = 500, 0.02
"""Looks until a worker is announced although its model's identity is not known: 10 s."""
_CHANGED = "the model's files have changed since they were read; a reload finds it"


@dataclass(slots=True)
class _Reading:
    worker_pool: WorkerPool
    plan: Plan
    """With a descriptor of its own for the tokenizer, because a reload that is refused closes the plan's."""
    fd: int
    is_urgent: bool
    not_before: float = 0.0
    num_failed: int = 0


class Identities:
    def __init__(self, on_changed: Callable[[], None]) -> None:
        """`on_changed` is called in whatever thread. Raises NoTasks without a thread."""
        self._on_changed = on_changed
        self._waiting: list[_Reading] = []
        self._known: dict[int, Digests] = {}
        self._changes = threading.Condition()
        self._reads_all = False
        with naming_limit():  # a daemon: it may be reading when the server ends
            threading.Thread(target=self._run, name="identities", daemon=True).start()

    def add(self, worker_pool: WorkerPool) -> None:
        """Find out the identity of a pool's model: at once if it is loaded with the server, or else after `read_all`.
        Raises OSError without a descriptor."""
        plan = worker_pool.plan
        fd = os.open(plan.gateway.card.tokenizer_file, os.O_RDONLY | os.O_CLOEXEC)
        card = replace(plan.gateway.card, tokenizer_file=f"/proc/self/fd/{fd}")
        plan = plan.with_gateway(card=card)
        with self._changes:
            self._waiting.append(_Reading(worker_pool, plan, fd, not plan.gateway.is_loaded_on_demand))
            self._changes.notify()

    def read_all(self) -> None:
        """The server is ready: from now on also read the files of models that are loaded on demand."""
        with self._changes:
            self._reads_all = True
            self._changes.notify()

    async def confirm(self, worker_pool: WorkerPool, files: FileAccess) -> None:
        """Withdraw the identity of a model whose files have changed since they were read for it: a worker may have read
        others. One that is not known yet is hurried and waited for, so that it does not come between the answers of one
        client."""
        with self._changes:
            digests = self._known.get(worker_pool.generation)
            for reading in self._waiting:
                reading.is_urgent |= reading.worker_pool is worker_pool
            self._changes.notify()
        if digests is None:
            for _ in range(NUM_LOOKS):
                if worker_pool.identity is not None:
                    break
                await asyncio.sleep(_LOOK_S)
            return
        plan = worker_pool.plan
        try:
            is_ours = await files.call(plan.card.folder, lambda: is_unchanged(plan, digests))
        except FilesHang as error:
            self._set(worker_pool, None, f"{error}; a reload finds it")
        else:
            if not is_ours:
                self._set(worker_pool, None, _CHANGED)

    def _run(self) -> None:
        while True:
            reading = self._next()
            try:
                digests = read_identity(reading.plan)
            except Exception as error:  # whatever it is: requests must not wait for what does not come
                self._on_failed(reading, one_line(error))
            else:
                os.close(reading.fd)
                if digests is not None:
                    self._known[reading.worker_pool.generation] = digests
                    # Of a worker that gets ready from now on `confirm` sees to it.
                    digests = digests if is_unchanged(reading.plan, digests) else None
                self._set(reading.worker_pool, digests, _CHANGED)

    def _next(self) -> _Reading:
        with self._changes:
            while True:
                now = monotonic()
                wanted = [each for each in self._waiting if each.is_urgent or self._reads_all]
                due = [each for each in wanted if each.not_before <= now]
                if due:
                    reading = min(due, key=lambda each: not each.is_urgent)
                    self._waiting.remove(reading)
                    return reading
                soonest = min((each.not_before for each in wanted), default=None)
                self._changes.wait(None if soonest is None else soonest - now)

    def _on_failed(self, reading: _Reading, problem: str) -> None:
        if reading.num_failed < len(PAUSES_S):
            reading.not_before = monotonic() + PAUSES_S[reading.num_failed]
            reading.num_failed += 1
            with self._changes:
                self._waiting.append(reading)
        else:
            os.close(reading.fd)
        self._set(reading.worker_pool, None, problem)

    def _set(self, worker_pool: WorkerPool, digests: Digests | None, problem: str) -> None:
        generation = worker_pool.generation
        if digests is None:
            worker_pool.log.warning("the model's identity is not known: %s", problem)
            self._known.pop(generation, None)
            worker_pool.identity = ModelIdentity(generation, "", problem=problem)
        else:
            worker_pool.identity = ModelIdentity(generation, digests.model, digests.by_alias)
        self._on_changed()
