"""Selects an engine in a process of its own, because the comparison loads transformers and a second copy of the model.

So the fork server, whose memory every worker shares, holds nothing that only the comparison needs, and a crash of the
comparison becomes an error message.
"""

from collections.abc import Sequence
from typing import Any, TextIO

from vecd.base import logs
from vecd.base.files import dump, load
from vecd.workers.batch import ReportProgress
from vecd.workers.config import WorkerConfig
from vecd.workers.process.ordered_process import OnFound, OrderedProcess, carry_out
from vecd.workers.select import Selection, select


class SelectionProcess(OrderedProcess):
    def __init__(self, command: Sequence[str], config: WorkerConfig) -> None:
        """Start it. Raises OSError."""
        title = f"{config.card.folder}: the process that compares the model's engines"
        super().__init__(command, dump(config), title)

    def result(self, report: ReportProgress) -> Selection:
        [(_, selection)] = self.results(report)
        found: Selection = load(Selection, selection)
        return found


def serve(orders: TextIO, response_fd: int) -> int:
    """Select as ordered and write the responses to `response_fd`; returns the exit code. Side effects on the process:
    those of `carry_out`; logging, torch's threads."""
    return carry_out(_select, orders, response_fd, "vecd-select")


def _select(order: dict[str, Any], report: ReportProgress, on_found: OnFound) -> None:
    config = load(WorkerConfig, order)
    logs.configure("choosing", config.log_level, config.log_format)
    selection, _ = select(config, report)
    on_found("selection", dump(selection))
