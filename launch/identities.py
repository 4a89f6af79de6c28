"""The identities of the models that the server has: found out, tried again, and withdrawn.

Reads files in one thread at a time, so that many models do not wear a cold disk out, first those of models that are
loaded with the server. Sets `WorkerPool.identity`. What an identity is made of is in `vecd.launch.config.identity`.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from vecd.launch.config.identity import Digests, read_identity
from vecd.launch.config.plan import Plan
from vecd.launch.files import FileAccess, FilesHang
from vecd.launch.workers import WorkerPool
from vecd.model.files import one_line
from vecd.shm.control import ModelIdentity

PAUSES_S = 2.0, 10.0, 60.0
"""Before each further try to read files."""
WAIT_S = 10.0
"""Until a worker is announced although its model's identity is not known."""
_FILES, _READ_TIMEOUT_S = "the identities of models", 86_400.0
_CHANGED = "the model's files have changed since they were read; a reload finds it"


@dataclass(slots=True)
class _Reading:
    worker_pool: WorkerPool
    plan: Plan
    """With a descriptor of its own for the tokenizer, because a reload that is refused closes the plan's."""
    fd: int
    is_urgent: bool
    num_failed: int = 0


class Identities:
    def __init__(self, files: FileAccess, on_changed: Callable[[], None]) -> None:
        self._files = files
        self._on_changed = on_changed
        self._waiting: list[_Reading] = []
        self._reads_all = False
        self._changed = asyncio.Event()

    def add(self, worker_pool: WorkerPool) -> None:
        """Find out the identity of a pool's model: at once if it is loaded with the server, or else after `read_all`.
        Raises OSError without a descriptor."""
        plan = worker_pool.plan
        fd = os.open(plan.gateway.card.tokenizer_file, os.O_RDONLY | os.O_CLOEXEC)
        plan = plan.with_gateway(card=replace(plan.gateway.card, tokenizer_file=f"/proc/self/fd/{fd}"))
        self._wait(_Reading(worker_pool, plan, fd, not plan.gateway.is_loaded_on_demand))

    def read_all(self) -> None:
        """The server is ready: from now on also read the files of models that are loaded on demand."""
        self._reads_all = True
        self._changed.set()

    async def confirm(self, worker_pool: WorkerPool) -> None:
        """Withdraw the identity of a model whose files have changed since they were read for it: a worker may have read
        others. One that is not known yet is hurried and waited for, so that it does not come between the answers of one
        client."""
        for reading in self._waiting:
            reading.is_urgent |= reading.worker_pool is worker_pool
        self._changed.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while worker_pool.identity is None:
                    self._changed.clear()
                    await self._changed.wait()
        if worker_pool.identity is None or not worker_pool.identity.digest:
            return
        plan, why = worker_pool.plan, _CHANGED
        try:
            has_changed = await self._files.call(plan.card.folder, plan.model_has_changed)
        except FilesHang as error:
            has_changed, why = True, f"{error}; a reload finds it"
        if has_changed:
            self._set(worker_pool, None, why)

    async def run(self) -> None:
        """Read, until cancelled."""
        while True:
            if wanted := [each for each in self._waiting if each.is_urgent or self._reads_all]:
                reading = min(wanted, key=lambda each: not each.is_urgent)
                self._waiting.remove(reading)
                await self._read(reading)
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _read(self, reading: _Reading) -> None:
        read, problem = partial(read_identity, reading.plan), _CHANGED
        try:
            digests = await self._files.call(_FILES, read, timeout_s=_READ_TIMEOUT_S)
        except Exception as error:  # whatever it is: requests must not wait for what does not come
            digests, problem = None, one_line(error)
            if reading.num_failed < len(PAUSES_S):
                asyncio.get_running_loop().call_later(PAUSES_S[reading.num_failed], self._wait, reading)
                reading.num_failed += 1
            else:
                os.close(reading.fd)
        else:
            os.close(reading.fd)
        self._set(reading.worker_pool, digests, problem)

    def _set(self, worker_pool: WorkerPool, digests: Digests | None, problem: str) -> None:
        generation = worker_pool.generation
        if digests is None:
            worker_pool.log.warning("the model's identity is not known: %s", problem)
            worker_pool.identity = ModelIdentity(generation, "", problem=problem)
        else:
            worker_pool.identity = ModelIdentity(generation, digests.model, digests.by_alias)
        self._changed.set()
        self._on_changed()

    def _wait(self, reading: _Reading) -> None:
        self._waiting.append(reading)
        self._changed.set()
