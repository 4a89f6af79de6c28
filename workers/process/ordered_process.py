"""A process that carries out one order: JSON on its standard input, responses as lines of JSON through a pipe.

Owns both ends: `OrderedProcess` starts the process and reads from it, `carry_out` runs in it. The parent keeps none of
the memory that the work needs, and a crash of the work becomes an error message.

The responses: {"stage": …} and {"found": name, "value": …} any number of times, then {"end": true} or {"error": …}.
"""

import json
import os
import select
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Self, TextIO, TypeAlias

from vecd.base.failures import without_interrupts
from vecd.base.tasks import naming_limit
from vecd.model.card import ModelError
from vecd.workers.process.kernel import (
    describe_status,
    die_with_parent,
    leave_no_core,
    set_process_name,
    volunteer_for_oom_kill,
)

_LAST_LINES_BYTES = 4096

OnFound: TypeAlias = Callable[[str, Any], None]
"""Called with the name and the value, as of JSON, of each result."""


class OrderedProcess:
    def __init__(
        self,
        command: Sequence[str],
        order: Mapping[str, Any],
        title: str = "the process",
        *,
        environment: Mapping[str, str] | None = None,
        stderr: BinaryIO | None = None,
    ) -> None:
        """Start `command` with the descriptor for its responses as last argument, and give it the order. `title` names
        it in errors. `environment` and `stderr`: None for this process's own. Errors repeat the last line in `stderr`.
        SIGINT stays blocked in it, as in every child. Raises OSError."""
        self._title, self._stderr = title, stderr
        reader, writer = os.pipe()
        self._responses = open(reader, "rb", buffering=0)  # noqa: SIM115  (closed by `__exit__`)
        try:
            with naming_limit(), without_interrupts():
                self._process = subprocess.Popen(
                    [*command, str(writer)],
                    pass_fds=[writer],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=environment,
                )
        finally:
            os.close(writer)
        self.pid = self._process.pid
        assert self._process.stdin
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # it died at once: `results` reports it
            stdin.write(json.dumps({**order, "parent_pid": os.getpid()}).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._responses.close()

    def results(self, report: Callable[[str], None], timeout_s: float | None = None) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of each result as it comes. Raises ModelError with the error of the work, or
        with a sentence about a process that died, or that wrote nothing for `timeout_s`."""
        stage, unread = "starting", b""
        while select.select([self._responses], [], [], timeout_s)[0]:
            received = self._responses.read(1 << 16)
            if not received:
                how = describe_status(self._process.wait())
                how += ", as the kernel does when memory runs out" if "SIGKILL" in how else ""
                raise ModelError(f"{self._title} {how}, while busy with: {stage}{self._last_words()}")
            *lines, unread = (unread + received).split(b"\n")
            for response in map(json.loads, lines):
                match response:
                    case {"stage": stage}:
                        report(stage)
                    case {"found": name, "value": value}:
                        yield name, value
                    case {"error": error}:
                        raise ModelError(error)
                    case _:
                        return
        raise ModelError(f"{self._title} gave no answer within {timeout_s:.0f} s, while busy with: {stage}")

    def _last_words(self) -> str:
        if self._stderr is None:
            return ""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_LINES_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""


def carry_out(
    work: Callable[[dict[str, Any], Callable[[str], None], OnFound], None], orders: TextIO, response_fd: int, name: str
) -> int:
    """A ModelError of the work becomes a response. Returns the exit code. Side effects on the process: it dies with its
    parent; `name`, memory priority, no core file."""
    order = json.loads(orders.read() or "{}")
    if not order or not die_with_parent(order.pop("parent_pid")):
        return 0  # the parent died before it gave the order, or has died since
    set_process_name(name)
    volunteer_for_oom_kill()
    leave_no_core()
    with open(response_fd, "w") as responses:

        def respond(**response: Any) -> None:
            print(json.dumps(response), file=responses, flush=True)

        try:
            work(order, lambda stage: respond(stage=stage), lambda name, value: respond(found=name, value=value))
        except ModelError as error:
            respond(error=str(error))
        else:
            respond(end=True)
    return 0
