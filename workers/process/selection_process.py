"""Selects an engine in a process of its own, because the comparison loads transformers and a second copy of the model.

Owns both ends of that process: `SelectionProcess` starts it and reads from it, `serve` runs in it. So the fork server,
whose memory every worker shares, holds nothing that only the comparison needs, and a crash of the comparison becomes an
error message. Called by `vecd.workers.process.forkserver` (SelectionProcess) and `vecd.launch.child` (serve).

The process writes JSON, one object a line: {"stage": …} any number of times, then {"selection": …} or {"error": …}.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vecd.shm import logs
from vecd.shm.card import ModelError
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import ReportProgress
from vecd.workers.engines.selection_cache import Selection
from vecd.workers.process.kernel import describe_status, die_with_parent, set_process_name, volunteer_for_oom_kill


class SelectionProcess:
    """The process, seen from its parent. It ends with its parent, and when its context ends."""

    def __init__(self, command: Sequence[str], config: WorkerConfig) -> None:
        """Start it. Raises OSError."""
        self._folder = config.card.folder
        reader, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(writer)], pass_fds=[writer], stdin=subprocess.PIPE, env=os.environ
            )
        finally:
            os.close(writer)
        self.pid = self._process.pid
        self._responses = open(reader)  # noqa: SIM115  (closed by `__exit__`)
        assert self._process.stdin
        order = {"config": config.to_json(), "parent_pid": os.getpid()}
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # it died at once: `result` reports it
            stdin.write(json.dumps(order).encode())

    def __enter__(self) -> "SelectionProcess":
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, whether or not its result was read."""
        self._end()
        self._responses.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def result(self, report: ReportProgress) -> Selection:
        """Wait for the selection. Raises ModelError when there is none, or when the process died."""
        stage = "starting"
        for line in self._responses:
            if not line.endswith("\n"):
                break  # the process died while it wrote the line
            response: dict[str, Any] = json.loads(line)
            if "stage" in response:
                stage = response["stage"]
                report(stage)
            elif "selection" in response:
                self._end()  # the caller needs its memory now
                return Selection.from_json(response["selection"])
            else:
                raise ModelError(response["error"])
        how = describe_status(self._process.wait())
        raise ModelError(f"{self._folder}: the process that compares the model's engines {how} while {stage}")


def serve(order_text: str, response_fd: int) -> int:
    """Select as ordered and write the responses to `response_fd`; returns the exit code.

    Side effects on the process: it dies with its parent; name, logging, memory priority, torch's threads.
    """
    if not order_text:
        return 0  # the parent died before it gave the order
    order = json.loads(order_text)
    if not die_with_parent(order["parent_pid"]):
        return 0
    set_process_name("vecd-select")
    volunteer_for_oom_kill()
    config = WorkerConfig.from_json(order["config"])
    logs.configure("choosing", config.log_level, config.log_format)
    from vecd.workers.engines.torch.selection import select  # takes seconds

    with open(response_fd, "w") as responses:

        def respond(**response: Any) -> None:
            print(json.dumps(response), file=responses, flush=True)

        try:
            selection, _ = select(config, lambda stage: respond(stage=stage))
        except ModelError as error:
            respond(error=str(error))
        else:
            respond(selection=selection.to_json())
    return 0
