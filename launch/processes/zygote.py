"""The supervisor's side of the zygote: the process that the fork servers of several models are forked from.

Owns that process. `fork_server` stands where a server of one model has `vecd.launch.processes.children.ForkServer`. The
fork servers are children of this process like any other, because the zygote leaves them to be adopted
(`vecd.workers.process.zygote`), so its death ends none of them.
"""

import asyncio
import logging
from collections.abc import Callable

from vecd.launch.base.exit_codes import ChildDied
from vecd.launch.processes.children import ForkServer, Process, readable, reap_adopted, spawn
from vecd.shm.control import Channel, ForkServerForked, ForkServerStart

log = logging.getLogger("vecd.supervisor")

_DYING_TIMEOUT_S = 5.0


class Zygote:
    """Started when a fork server is first needed, and again for the next one should it die.

    This process must adopt orphans (`vecd.workers.process.kernel.adopt_orphans`).
    """

    def __init__(self) -> None:
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        """Held for one fork server at a time: the deadline of one does not run while another's modules are imported."""

    def fork_server(
        self, start: ForkServerStart, start_timeout_s: float, on_stage: Callable[[str], None]
    ) -> ForkServer:
        """A fork server whose process is forked from this one. Arguments as of `ForkServer`."""
        return ForkServer(start, start_timeout_s, on_stage, self._fork)

    def pids(self) -> list[int]:
        """Of the process, if it runs."""
        return [self._process.pid] if self._process is not None else []

    async def stop(self) -> None:
        """Kill the process. Fork servers go on."""
        self._kill()
        if self._watching is not None:
            await asyncio.wait([self._watching], timeout=_DYING_TIMEOUT_S)

    async def _fork(self, order: ForkServerStart, timeout_s: float) -> Process:
        """Raises ChildDied when the zygote dies or has not forked after `timeout_s`, OSError when it cannot be started
        or without descriptors."""
        async with self._lock:
            ours, theirs = Channel.pair()
            try:
                try:
                    self._ensure_running().channel.send(order, [theirs.fileno()])
                finally:
                    theirs.close()
                async with asyncio.timeout(timeout_s):
                    await readable(ours.fileno())
                received = ours.receive(0)
            except BaseException as error:
                ours.close()
                if isinstance(error, TimeoutError):
                    self._kill()
                    raise ChildDied(f"the zygote has not forked it after {timeout_s:g} s, and is killed") from error
                raise
        match received:
            case ForkServerForked() as forked, [pidfd]:

                async def reap() -> int | None:
                    return reap_adopted(pidfd)

                return Process("fork server", forked.pid, pidfd, ours, reap)
            case ForkServerForked(error=why), []:
                ours.close()
                raise ChildDied(why)
        ours.close()
        raise ChildDied("the zygote died")

    def _ensure_running(self) -> Process:
        if self._process is None:
            self._process = spawn("zygote", "zygote")
            self._watching = asyncio.create_task(self._watch(self._process))
        return self._process

    async def _watch(self, process: Process) -> None:
        """Reap the process at its end."""
        how = await process.ended()
        if self._process is process:
            log.error("the zygote %s; there will be another one for the next fork server", how)
            self._process = None
        process.close()

    def _kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
