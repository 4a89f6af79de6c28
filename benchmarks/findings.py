"""What `make bench-engine` has found out: written down as it comes, and summed up as a table.

Owns the shape of a finding, the lines of `benchmarks/results/*-engine.jsonl` and the Markdown for `docs/log.md`.
Measures nothing. Called by `benchmarks.engine`; findings are made by `benchmarks.duels`, `.memory` and `.lives`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from benchmarks.machine import describe_machine
from benchmarks.targets import Target

_DISTURBING_CORES = 0.1
"""As in `benchmarks.notebook`: from here on what else ran on the machine is part of the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One comparison, or one figure that has no peer."""

    section: str
    """Of `benchmarks.engine.SECTIONS` or `benchmarks.cores.SECTIONS`."""
    work: str
    dtype: str
    unit: str
    ours: float
    """A median over the rounds, in `unit`."""
    peer: str = ""
    theirs: float | None = None
    ratio: float | None = None
    """vecd's speed ÷ the peer's within each round, and the median of that: above 1, vecd is faster."""
    interval: tuple[float, float] | None = None
    """Of the ratio, `benchmarks.turns.median_interval`; None for too few rounds."""
    target: Target | None = None
    others_cores: float
    """What everybody else on the machine used meanwhile."""
    details: dict[str, Any] = field(default_factory=dict)
    """JSON: each round's figures, and how the peer was run."""

    @property
    def is_met(self) -> bool | None:
        """None where nothing is asked."""
        value = self.ours if self.ratio is None else self.ratio
        return self.target.is_met_by(value, self.interval) if self.target else None

    @property
    def is_disturbed(self) -> bool:
        return self.others_cores > _DISTURBING_CORES

    def to_json(self) -> dict[str, Any]:
        return {
            "section": self.section,
            "work": self.work,
            "dtype": self.dtype,
            "unit": self.unit,
            "vecd": rounded(self.ours),
            "peer": self.peer or None,
            "peer_figure": None if self.theirs is None else rounded(self.theirs),
            "ratio": None if self.ratio is None else rounded(self.ratio),
            "interval": None if self.interval is None else [rounded(bound) for bound in self.interval],
            "target": str(self.target) if self.target else None,
            "is_met": self.is_met,
            "others_cores": round(self.others_cores, 3),
            **self.details,
        }


class Journal:
    """Appends each finding to the day's file at once: a run that is broken off has still measured."""

    def __init__(self, folder: Path, model: str, experiment: dict[str, Any]) -> None:
        """`model`: the shape's name, or the last part of the folder's."""
        self.findings: list[Finding] = []
        self._folder = folder
        self._machine = describe_machine()
        self._of_all = {
            "session": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": model,
            "class": self._machine["class"],
        }
        self._experiment = experiment

    def add(self, finding: Finding) -> None:
        """Raises OSError when it cannot be written."""
        self.findings.append(finding)
        now = datetime.now(UTC)
        line = {
            "ended_at": now.isoformat(timespec="seconds"),
            **self._of_all,
            **finding.to_json(),
            "experiment": self._experiment,
            "machine": self._machine,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{now:%Y-%m-%d}-engine.jsonl").open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def render_findings(findings: Sequence[Finding]) -> str:
    """Markdown, a line for each finding, in the order given."""
    columns = ["work", "vecd", "peer", "ratio", "target", "met?"]
    lines = [columns, ["---"] * len(columns), *(_cells(finding) for finding in findings)]
    num_disturbed = sum(finding.is_disturbed for finding in findings)
    remark = f"{num_disturbed} of {len(findings)} were disturbed (*): others used over {_DISTURBING_CORES:g} cores."
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", remark])


def render_line(finding: Finding) -> str:
    """One finding, while others are still being made."""
    work, ours, peer, ratio, target, met = _cells(finding)
    return f"{work}: {ours}; {peer}; ratio {ratio}, target {target}: {met}"


def _cells(finding: Finding) -> list[str]:
    theirs = (
        f"{finding.peer} {readable(finding.theirs)} {finding.unit}"
        if finding.theirs is not None
        else finding.peer or "–"
    )
    return [
        f"{finding.work}, {finding.dtype}{' *' if finding.is_disturbed else ''}",
        f"{readable(finding.ours)} {finding.unit}",
        theirs,
        ratio_cell(finding.ratio, finding.interval),
        "–" if finding.target is None else str(finding.target),
        {True: "yes", False: "no", None: "–"}[finding.is_met],
    ]


def ratio_cell(ratio: float | None, interval: Sequence[float] | None) -> str:
    """The ratio and its interval, for readers."""
    if ratio is None:
        return "–"
    return f"{ratio:.2f}" if interval is None else f"{ratio:.2f} ({interval[0]:.2f}–{interval[1]:.2f})"


def rounded(value: float) -> float:
    """To what is worth reading: five significant digits."""
    return float(f"{value:.5g}")


def readable(value: float) -> str:
    """Four significant digits, but never 1.235e+04."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
