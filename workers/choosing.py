"""Chooses an engine in a process of its own: it loads transformers and a second copy of the model, and then is gone.

Owns that process, both ends of it: `Choosing` starts it and hears it, `serve` is it. So the fork server, whose memory
every worker shares, stays free of what only the comparison needs, and a model that crashes it is an error message.
Called by `workers.forkserver` (Choosing) and `launch.child` (serve).

Its output is JSON, one object a line: {"stage": …} any number of times, then {"choice": …} or {"error": …}.
"""

import json
import logging
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from shm.card import ModelError
from workers.choices import Choice
from workers.config import WorkerConfig
from workers.engine import Report
from workers.process import die_with_parent, set_process_name


class Choosing:
    """The process, seen from its parent. Ends with it."""

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
        self._answers = open(reader)  # noqa: SIM115  (closed by `result`)
        assert self._process.stdin
        order = {"config": config.to_json(), "parent_pid": os.getpid()}
        self._process.stdin.write(json.dumps(order).encode())
        self._process.stdin.close()

    def result(self, report: Report) -> Choice:
        """Wait for the choice. Raises ModelError when there is none, or the process died."""
        with self._answers:
            for line in self._answers:
                answer: dict[str, Any] = json.loads(line)
                if "stage" in answer:
                    report(answer["stage"])
                elif "choice" in answer:
                    self._process.wait()
                    return Choice.from_json(answer["choice"])
                else:
                    raise ModelError(answer["error"])
        status = self._process.wait()
        raise ModelError(f"{self._folder}: comparing the model's engines ended with exit code {status}")


def serve(order_text: str, answer_fd: int) -> int:
    """Be that process: choose as it was ordered and write the answers to `answer_fd`; returns the exit code.

    Side effects on the process: it dies with its parent, and has a name and one thread per forward pass.
    """
    order = json.loads(order_text)
    if not die_with_parent(order["parent_pid"]):
        return 0
    set_process_name("vecd-choose")
    config = WorkerConfig.from_json(order["config"])
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s choosing %(levelname)s %(message)s")
    from workers.engines.choice import choose  # takes seconds

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
