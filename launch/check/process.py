"""Runs one order in a process of its own and passes on what it finds, or a sentence about how it ended.

Owns the pipes, the deadline and the end of the process. The other ends are `vecd.launch.check.tokens` and
`vecd.workers.check.run`, which describes the messages. Called by `vecd.launch.check.command`.
"""

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from vecd.launch.base.programs import self_command
from vecd.launch.processes.children import child_environment
from vecd.shm.card import ModelError
from vecd.workers.process.kernel import describe_status

_LAST_LINES_CHARS = 4096


def run(
    kind: str,
    order: dict[str, Any],
    timeout_s: float,
    on_stage: Callable[[str], None],
    on_found: Callable[[str, Any], None],
) -> None:
    """Start a child of `kind` (a function of `vecd.launch.child`), give it the order and wait for its end.

    `on_stage` gets the name of each stage, `on_found` the name and value of each part of the result. Raises ModelError
    with the child's error, or with a sentence about a child that died, or that was silent for `timeout_s`.
    """
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0), tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                [*self_command(kind), str(writer)],
                pass_fds=[writer],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=child_environment(),
            )
        finally:
            os.close(writer)
        stage = "starting"
        try:
            assert process.stdin
            with suppress(BrokenPipeError), process.stdin as stdin:  # it died at once: the end of its messages tells
                stdin.write(json.dumps({"parent_pid": os.getpid(), **order}).encode())
            for message in _messages(reader, timeout_s):
                if "stage" in message:
                    stage = message["stage"]
                    on_stage(stage)
                elif "found" in message:
                    on_found(message["found"], message["value"])
                elif "error" in message:
                    raise ModelError(message["error"])
                else:
                    return
            how = describe_status(process.wait())
            memory = ", as the kernel does when memory runs out" if "SIGKILL" in how else ""
            raise ModelError(f"the process {how}{memory}, while busy with: {stage}{_last_words(stderr)}")
        except TimeoutError:
            raise ModelError(
                f"no answer within {timeout_s:.0f} s from the process that was busy with: {stage}"
            ) from None
        finally:
            process.kill()
            process.wait()


def _messages(reader: int, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Ends at the end of the pipe. Raises TimeoutError."""
    unread = b""
    deadline = time.monotonic() + timeout_s
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        received = os.read(reader, 1 << 16)
        if not received:
            return
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            yield json.loads(line)
            deadline = time.monotonic() + timeout_s
    raise TimeoutError


def _last_words(stderr: BinaryIO) -> str:
    """The last line that the process wrote to stderr, in parentheses."""
    stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, stderr.tell() - _LAST_LINES_CHARS))
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    return f" ({lines[-1].strip()})" if lines else ""
