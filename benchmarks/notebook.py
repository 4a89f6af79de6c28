"""What a comparison has measured, written down piece by piece, and read again.

Owns the lines of `benchmarks/results/*-servers.jsonl` and what they mean. Measures nothing, sums nothing up. Written by
`benchmarks.compare`, read by `benchmarks.figures` and `benchmarks.page`.

A session is one call of `make bench`. Its lines are of five kinds: "session" (once, first), "server" (one that is
measured), "skipped" (one that is not, or no longer), "run" and "offline".
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

DISTURBING_CORES = 0.1
"""From here on what else ran on the machine is part of the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A server that took part, and how."""

    server: str
    version: str
    command: str
    environment: dict[str, str]
    remark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    server: str
    reason: str
    round: int = 0
    """In which it failed; 0 when it never started."""
    is_out: bool = True
    """For the rounds to come, too."""
    workload: str = ""
    """The only one it is not measured in; "" for all that were left of the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One workload, one server, one round."""

    server: str
    round: int
    workload: str
    figures: dict[str, Any]
    """`vecd.client.bench.report.fields`: every name has its unit."""
    server_cores: float
    """CPU over the whole run, its warm-up included, in cores: 1.0 is one core all the time."""
    others_cores: float
    """Of neither the server nor the load generator."""
    memory_mb: float
    """Of all the server's processes, after the workload's rest."""
    texts_per_batch: float | None = None
    """vecd's, under this load."""
    info: dict[str, Any] = field(default_factory=dict)
    """vecd's own word on its limits and workers, just after the run."""

    @property
    def is_disturbed(self) -> bool:
        return self.others_cores > DISTURBING_CORES


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """vecd's engine without a server, a process on each core, all at once."""

    dtype: str
    round: int
    work: str
    """"short" and "mixed" are the sums of all processes; "single" is one text at a time in one of them."""
    texts_per_batch: int
    texts_per_s: float
    tokens_per_s: float
    p50_ms: float
    """Of one batch."""
    others_cores: float

    @property
    def is_disturbed(self) -> bool:
        return self.others_cores > DISTURBING_CORES


@dataclass(slots=True)
class Session:
    """Everything of one call."""

    started_at: str
    """UTC, to the second; names the session."""
    command: str
    plan: dict[str, Any]
    machine: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    offline: list[Offline] = field(default_factory=list)

    def add(self, piece: Measured | Skipped | Run | Offline) -> None:
        match piece:
            case Measured():
                self.measured.append(piece)
            case Skipped():
                self.skipped.append(piece)
            case Run():
                self.runs.append(piece)
            case Offline():
                self.offline.append(piece)


_KINDS: dict[str, type[Measured] | type[Skipped] | type[Run] | type[Offline]] = {
    "server": Measured,
    "skipped": Skipped,
    "run": Run,
    "offline": Offline,
}


class Notebook:
    """Appends each piece to the day's file at once: a comparison that is broken off has still measured."""

    def __init__(self, folder: Path, command: str, plan: dict[str, Any], machine: dict[str, Any]) -> None:
        now = datetime.now(UTC)
        self.session = Session(now.isoformat(timespec="seconds"), command, plan, machine)
        self.file = folder / f"{now:%Y-%m-%d}-servers.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._write("session", {"command": command, "plan": plan, "machine": machine})

    def add(self, piece: Measured | Skipped | Run | Offline) -> None:
        """Raises OSError when it cannot be written."""
        self.session.add(piece)
        [kind] = (kind for kind, of_kind in _KINDS.items() if isinstance(piece, of_kind))
        self._write(kind, asdict(piece))

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        line = {
            "session": self.session.started_at,
            "kind": kind,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            **fields,
        }
        with self.file.open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def read_sessions(file: Path) -> Sequence[Session]:
    """All sessions of a day, in their order. Raises OSError, or ValueError when a line is none of ours."""
    sessions: dict[str, Session] = {}
    for line in file.read_bytes().splitlines():
        fields = orjson.loads(line)
        name, kind, _ = fields.pop("session"), fields.pop("kind"), fields.pop("at")
        if kind == "session":
            sessions[name] = Session(name, **fields)
        elif kind in _KINDS:
            sessions[name].add(_KINDS[kind](**fields))
        else:
            raise ValueError(f"{file.name}: a line of an unknown kind, {kind!r}")
    return list(sessions.values())
