"""Selects an engine in a process of its own, because the comparison loads transformers and a second copy of the model.

So the fork server, whose memory every worker shares, holds nothing that only the comparison needs, and a crash of the
comparison becomes an error message.
"""

from vecd.base import logs
from vecd.base.files import JsonObject, dump, load
from vecd.shm.job import Job
from vecd.workers.batch import ReportProgress
from vecd.workers.config import WorkerConfig
from vecd.workers.select import Selection, select


class SelectionProcess(Job):
    def __init__(self, config: WorkerConfig) -> None:
        """Start it. Raises OSError."""
        super().__init__("select", f"{config.card.folder}: the process that compares the model's engines")
        self.start(config=dump(config))

    def result(self, report: ReportProgress) -> Selection:
        found: Selection = load(Selection, dict(self.results(report)))
        return found


def work(report: ReportProgress, config: JsonObject) -> JsonObject:
    """The job "select". Side effects on the process: logging, torch's threads."""
    loaded = load(WorkerConfig, config)
    logs.configure("choosing", loaded.log_level, loaded.log_format)
    selection, _ = select(loaded, report)
    found: JsonObject = dump(selection)
    return found
