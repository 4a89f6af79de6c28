"""A process that carries out orders, one at a time, until its parent closes the channel or dies.

Owns both ends: `Job` starts the process and reads from it, `carry_out` runs in it. The parent keeps none of the memory
that the work needs, and a crash of the work becomes an error message.

    parent → process   JobOrder
    process → parent   Progress and JobFound any number of times, then Ready or ChildFailed
"""

import importlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, Self, TypeAlias

from vecd.base.failures import EXIT_OK, ModelError
from vecd.base.kernel import (
    describe_status,
    die_with_parent,
    leave_no_core,
    leave_signals_to_parent,
    set_process_name,
    volunteer_for_oom_kill,
)
from vecd.base.programs import start_child
from vecd.base.tasks import naming_limit
from vecd.shm.control import Channel, ChildFailed, JobFound, JobOrder, Progress, Ready

_LAST_LINES_BYTES = 4096

Report: TypeAlias = Callable[[str], None]
"""Called with each stage of the work."""


class JobDied(ModelError):
    """`status`: how the process ended, as `Popen.returncode` has it; None: it gave no answer in time."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class Job:
    def __init__(self, kind: str, title: str = "the process", stderr: BinaryIO | int | None = None) -> None:
        """Start a process of `kind`, one of `vecd.child`. `title` names it in errors, which repeat the last line of a
        file `stderr`. Raises OSError."""
        self._title, self._stderr = title, stderr
        with naming_limit():
            self.process, sock = start_child(kind, stdout=subprocess.DEVNULL, stderr=stderr)
        self.channel = Channel(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.wait()

    def kill(self) -> None:
        """The caller waits for the process."""
        self.process.kill()
        self.channel.close()

    def start(self, **order: Any) -> None:
        with suppress(ConnectionError):  # it died at once: `results` reports it
            self.channel.send(JobOrder(order, os.getpid()))

    def results(self, report: Report = lambda stage: None, timeout_s: float | None = None) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of each result of the order as it comes; `report` is called with each stage.
        Raises ModelError with the error of the work, and JobDied for a process that died, or that sent nothing for
        `timeout_s`."""
        stage = "starting"
        while True:
            try:
                received = self.channel.receive(timeout_s)
            except TimeoutError:
                problem = f"{self._title} gave no answer within {timeout_s:.0f} s, while busy with: {stage}"
                raise JobDied(problem, None) from None
            match received:
                case (Progress() as progress, _):
                    stage = progress.stage
                    report(stage)
                case (JobFound() as found, _):
                    yield found.name, found.value
                case (ChildFailed() as failed, _):
                    raise ModelError(failed.message)
                case (Ready() as ready, _):
                    yield from ready.facts.items()
                    return
                case _:
                    status = self.process.wait()
                    how = describe_status(status)
                    how += ", as the kernel does when memory runs out" if "SIGKILL" in how else ""
                    raise JobDied(f"{self._title} {how}, while busy with: {stage}{self._last_words()}", status)

    def _last_words(self) -> str:
        if self._stderr is None or isinstance(self._stderr, int):
            return ""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_LINES_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""


def run_job(
    kind: str,
    title: str = "the process",
    report: Report = lambda stage: None,
    timeout_s: float | None = None,
    **order: Any,
) -> Iterator[tuple[str, Any]]:
    """Yield what a process finds that is started for this order alone, as `Job.results` does. Raises OSError, too."""
    with tempfile.TemporaryFile() as stderr, Job(kind, title, stderr) as job:
        job.start(**order)
        yield from job.results(report, timeout_s)


def carry_out(kind: str, module: str, channel: Channel) -> int:
    """Have `work` of a module carry out each order; a ModelError of it becomes the response. It is called with a
    `Report` and the fields of the order by name, and returns its results, or yields them. Returns the exit code. Side
    effects on the process: it dies with its parent; name, memory priority, no core file; SIGINT, SIGTERM and SIGHUP
    are ignored."""
    set_process_name(f"vecd-{kind}")
    leave_signals_to_parent()
    volunteer_for_oom_kill()
    leave_no_core()
    while (received := channel.receive()) is not None:
        order, _ = received
        if not isinstance(order, JobOrder) or not die_with_parent(order.parent_pid):
            break  # the parent has died since it gave the order
        work = importlib.import_module(module).work  # may take seconds
        try:
            found = work(lambda stage: channel.send(Progress(stage)), **order.fields)
            if isinstance(found, Iterator):
                for name, value in found:
                    channel.send(JobFound(name, value))
            channel.send(Ready(found if isinstance(found, dict) else {}))
        except ModelError as error:
            channel.send(ChildFailed(str(error)))
    return EXIT_OK
