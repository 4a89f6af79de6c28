"""Chooses an engine in a process of its own: it loads transformers and a second copy of the model, and then is gone.

Owns that process, both ends of it: `SelectionProcess` starts it and hears it, `serve` is it. So the fork server, whose
memory every worker shares, stays free of what only the comparison needs, and a model that crashes it is an error
message. Called by `vecd.workers.process.forkserver` (Choosing) and `vecd.launch.child` (serve).

Its output is JSON, one object a line: {"stage": …} any number of times, then {"choice": …} or {"error": …}.
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
from vecd.workers.engine import Report
from vecd.workers.engines.selection_cache import Selection
from vecd.workers.process.kernel import describe_status, die_with_parent, set_process_name, volunteer_for_oom_kill


class SelectionProcess:
    """The process, seen from its parent. Ends with it, and with the block that it is a context of."""

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
        self._answers = open(reader)  # noqa: SIM115  (closed by `__exit__`)
        assert self._process.stdin
        order = {"config": config.to_json(), "parent_pid": os.getpid()}
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # it died at once: `result` says so
            stdin.write(json.dumps(order).encode())

    def __enter__(self) -> "SelectionProcess":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process behind, whether or not it has been heard to its end."""
        self._end()
        self._answers.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def result(self, report: Report) -> Selection:
        """Wait for the choice. Raises ModelError when there is none, or the process died."""
        stage = "starting"
        for line in self._answers:
            if not line.endswith("\n"):
                break  # it died in the middle of it
            answer: dict[str, Any] = json.loads(line)
            if "stage" in answer:
                stage = answer["stage"]
                report(stage)
            elif "choice" in answer:
                self._end()  # its memory is wanted now
                return Selection.from_json(answer["choice"])
            else:
                raise ModelError(answer["error"])
        how = describe_status(self._process.wait())
        raise ModelError(f"{self._folder}: the process that compares the model's engines {how} while {stage}")


def serve(order_text: str, answer_fd: int) -> int:
    """Be that process: choose as it was ordered and write the answers to `answer_fd`; returns the exit code.

    Side effects on the process: it dies with its parent; name, logging, memory priority, torch's threads.
    """
    if not order_text:
        return 0  # the parent died before it gave the order
    order = json.loads(order_text)
    if not die_with_parent(order["parent_pid"]):
        return 0
    set_process_name("vecd-choose")
    volunteer_for_oom_kill()
    config = WorkerConfig.from_json(order["config"])
    logs.configure("choosing", config.log_level, config.log_format)
    from vecd.workers.engines.selection import choose  # takes seconds

    with open(answer_fd, "w") as answers:

        def say(**answer: Any) -> None:
            print(json.dumps(answer), file=answers, flush=True)

        try:
            choice, _ = choose(config, lambda stage: say(stage=stage))
        except ModelError as error:
            say(error=str(error))
        else:
            say(choice=choice.to_json())
    return 0
