"""What a comparison has measured: written down run by run, and summed up as a table.

Owns the files in `benchmarks/results/` and the Markdown for `docs/log.md`. Measures nothing. Called by
`benchmarks.compare`.
"""

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

import orjson

from benchmarks.cpu import CpuShares
from benchmarks.machine import describe_machine
from client import report
from client.tally import Result

_DISTURBING_CORES = 0.1
"""From here on what else ran on the machine is part of the figures."""
_COLUMN_ORDER = ("reference", "vecd")


@dataclass(frozen=True, slots=True)
class Run:
    """One result, and whose."""

    server: str
    round: int
    result: Result
    cpu: CpuShares
    """Over the whole run, its warm-up included."""

    @property
    def is_disturbed(self) -> bool:
        return self.cpu.others > _DISTURBING_CORES


class Notebook:
    """Appends each run to the day's file at once: a comparison that is broken off has still measured."""

    def __init__(self, folder: Path, experiment: dict[str, Any]) -> None:
        self.runs: list[Run] = []
        self._folder = folder
        self._experiment = experiment
        self._machine = describe_machine()

    def add(self, run: Run, command: Sequence[str]) -> None:
        """Keep `run` of the server started by `command`. Raises OSError when it cannot be written."""
        self.runs.append(run)
        now = datetime.now(UTC)
        line = {
            "ended_at": now.isoformat(timespec="seconds"),
            "server": run.server,
            "round": run.round,
            # Names without folders: where this machine keeps things says nothing about the run.
            "command": shlex.join(PurePath(part).name if part.startswith("/") else part for part in command),
            **self._experiment,
            **report.fields(run.result),
            "server_cores": round(run.cpu.server, 3),
            "others_cores": round(run.cpu.others, 3),
            "machine": self._machine,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{now:%Y-%m-%d}-reference.jsonl").open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def disturbances(run: Run) -> list[str]:
    """What a reader must know of the machine during `run`."""
    return [f"others used {run.cpu.others:.2f} cores meanwhile"] if run.is_disturbed else []


def render_table(runs: Sequence[Run]) -> str:
    """Markdown: a line for each number of clients; median (smallest–largest) of the rounds."""
    servers = [name for name in _COLUMN_ORDER if any(run.server == name for run in runs)]
    columns = ["clients", *(f"{name}, {figure}" for figure in ("req/s", "p50 ms", "p99 ms") for name in servers)]
    if len(servers) == 2:
        columns.append("req/s ratio")
    lines = [columns, ["---"] * len(columns)]
    for clients in sorted({run.result.clients for run in runs}):
        results = {
            name: [run.result for run in runs if run.server == name and run.result.clients == clients]
            for name in servers
        }
        lines.append([str(clients), *_cells(results)])
    table = [f"| {' | '.join(line)} |" for line in lines]
    num_disturbed = sum(run.is_disturbed for run in runs)
    remark = f"{num_disturbed} of {len(runs)} runs were disturbed: others used over {_DISTURBING_CORES:g} cores."
    return "\n".join([*table, "", remark])


def _cells(results: dict[str, list[Result]]) -> list[str]:
    rates = [[result.requests_per_s for result in of_server] for of_server in results.values()]
    medians = [[result.latency.p50_ms for result in of_server] for of_server in results.values()]
    tails = [[result.latency.p99_ms for result in of_server] for of_server in results.values()]
    cells = [_spread(values) for values in (*rates, *medians, *tails)]
    if len(rates) == 2:
        cells.append(_ratio(rates[1], rates[0]))
    return cells


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.4g} ({min(values):.4g}–{max(values):.4g})"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    if not ours or not theirs or not statistics.median(theirs):
        return "–"
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}×"
