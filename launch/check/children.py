"""The processes that `vecd check` measures in, seen from it: an order goes in, an answer comes out, or a sentence about
how the process ended.

Owns their pipes, deadlines and ends. What is done in them is `vecd.workers.check.orders`'s and
`vecd.launch.check.tokens`'. Called by `vecd.launch.check.measure`.
"""

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vecd.launch.base.programs import self_command
from vecd.launch.processes.children import child_environment
from vecd.shm.card import ModelError
from vecd.workers.process.kernel import describe_status

_READ_BYTES = 1 << 16
_LAST_LINES_CHARS = 4096


class Child:
    """One of them. Ends with the block that it is a context of, and with this process."""

    def __init__(self, kind: str, on_stage: Callable[[str], None]) -> None:
        """`kind`: of `vecd.launch.child`. `on_stage` is told what it is doing. Raises OSError."""
        self._on_stage = on_stage
        self._stage = "starting"
        self._unread = b""
        reader, writer = os.pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `__exit__`)
        try:
            self._process = subprocess.Popen(
                [*self_command(kind), str(writer)],
                pass_fds=[writer],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env=child_environment(),
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._answers = reader
        self.pid = self._process.pid

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process behind, whether or not it has answered."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        os.close(self._answers)
        self._stderr.close()

    def ask(self, timeout_s: float, **order: Any) -> dict[str, Any]:
        """Give an order and wait for its result.

        Raises ModelError with the error that was answered, or a sentence about a process that died or did not answer
        in time.
        """
        self._stage = str(order.get("do", "")).replace("_", " ")
        line = json.dumps({"parent_pid": os.getpid(), **order}) + "\n"
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it has died: the answer says so
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while True:
            answer = json.loads(self._line(deadline, timeout_s))
            if "stage" in answer:
                self._stage = answer["stage"]
                self._on_stage(self._stage)
            elif "result" in answer:
                result: dict[str, Any] = answer["result"]
                return result
            else:
                raise ModelError(answer["error"])

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise ModelError(
                    f"no answer within {timeout_s:.0f} s from the process that was busy with: {self._stage}"
                )
            read = os.read(self._answers, _READ_BYTES)
            if not read:
                raise ModelError(self._describe_death())
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _describe_death(self) -> str:
        how = describe_status(self._process.wait())
        memory = ", as the kernel does when memory runs out" if "SIGKILL" in how else ""
        said = self._last_words()
        return f"the process {how}{memory}, while busy with: {self._stage}{f' ({said})' if said else ''}"

    def _last_words(self) -> str:
        """The last line that it wrote to stderr."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _LAST_LINES_CHARS))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""
