"""Who used the CPU during a run: the server, the load generator, or somebody else whose noise is in the figures.

Owns the reading of /proc (Linux only). Changes nothing. Called by `benchmarks.compare`, `.duels`, `.memory`,
`.lives` and by the sections of `benchmarks.cores`.
"""

import os
import resource
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Fields of the "cpu" line in /proc/stat that are time spent working: all but idle and iowait, and guest time, which
# is in user time already. Steal counts: a neighbour on the host disturbs as much as one in here. Source: proc(5).
_WORKING = (0, 1, 2, 5, 6, 7)


_QUIET_LOOKS, _LOOK_S = 3, 0.001
"""So often in a row nobody may run: between two looks a thread may have waited for a moment only."""


@dataclass(frozen=True, slots=True)
class CpuShares:
    """CPU used over a span of time, in cores: 1.0 is one core all the time."""

    server: float
    others: float
    """Neither the server nor this process."""


class CpuClock:
    """Measures from `__init__`, then from lap to lap."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._last = self._read()

    def lap(self) -> CpuShares:
        """Shares since the last lap. A child that died meanwhile counts for its parent, or for the others."""
        before, self._last = self._last, self._read()
        wall_s, machine_s, own_s, server_s = (now - then for now, then in zip(self._last, before, strict=True))
        server_s = max(0.0, server_s)  # less than before when a process of it has died
        others_s = max(0.0, machine_s - own_s - server_s)
        return CpuShares(server=server_s / wall_s, others=others_s / wall_s)

    def _read(self) -> tuple[float, float, float, float]:
        return (time.perf_counter(), _machine_cpu_s(), time.process_time(), _session_cpu_s(self._session))


def _machine_cpu_s() -> float:
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    return sum(int(fields[index]) for index in _WORKING) * _TICK_S


def _session_cpu_s(session: int) -> float:
    """Of all processes in the session, and of their children that have been waited for."""
    return sum(_process_cpu_s(path, session) for path in Path("/proc").glob("[0-9]*/stat"))


def _process_cpu_s(stat: Path, session: int) -> float:
    try:
        text = stat.read_text()
    except OSError:  # it has ended since the listing
        return 0.0
    # After the command's name, which may hold anything: state, parent, group, session … and from the 12th on,
    # user and system time of the process and of its waited-for children. Source: proc(5).
    fields = text.rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * _TICK_S if int(fields[3]) == session else 0.0


class Neighbours:
    """Measures from `__init__` what all but this process and its children use.

    For spans in which children come and go: they count once they, and theirs, have been waited for. Those that live
    all the while are named by their `sessions`.
    """

    def __init__(self, sessions: Collection[int] = ()) -> None:
        self._sessions = sessions
        self._started_s, self._others_s = time.perf_counter(), self._others_cpu_s()

    def cores(self) -> float:
        """Since the beginning: 1.0 is one core all the time."""
        return max(0.0, self._others_cpu_s() - self._others_s) / (time.perf_counter() - self._started_s)

    def _others_cpu_s(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        own_s = time.process_time() + children.ru_utime + children.ru_stime
        return _machine_cpu_s() - own_s - sum(map(_session_cpu_s, self._sessions))


def process_cpu_s(pid: int) -> float:
    """Processor time of one process so far, in steps of 10 ms; 0 once it has ended."""
    stat = Path(f"/proc/{pid}/stat")
    session = _session_of(stat)
    return 0.0 if session is None else _process_cpu_s(stat, session)


def await_asleep(sessions: Iterable[int], timeout_s: float = 2.0) -> float:
    """Return once no thread of these sessions runs, or after `timeout_s`: the seconds that this has taken.

    Threads of a pool look for work in a loop for a while after a forward pass: they would disturb whoever is next.
    """
    wanted, started_s, num_quiet_looks = set(sessions), time.perf_counter(), 0
    folders = [path.parent for path in Path("/proc").glob("[0-9]*/stat") if _session_of(path) in wanted]
    while (elapsed_s := time.perf_counter() - started_s) < timeout_s:
        num_quiet_looks = 0 if any(map(_runs, folders)) else num_quiet_looks + 1
        if num_quiet_looks == _QUIET_LOOKS:
            return elapsed_s
        time.sleep(_LOOK_S)
    return elapsed_s


def _session_of(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[3])
    except OSError:  # it has ended since the listing
        return None


def _runs(process: Path) -> bool:
    try:
        return any(stat.read_text().rpartition(")")[2].split()[0] == "R" for stat in process.glob("task/*/stat"))
    except OSError:  # a thread has ended
        return True
