"""Trials of a server of several models: what becomes of the others while one model is killed, replaced or evicted, and
of all while they do not fit into the memory together.

Owns the order of the stretches and what is done to the server in them. Called by `benchmarks.models` and by
tests/system/soak.
"""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.callers import Callers, Summary
from benchmarks.flood import send_all
from benchmarks.requests import command, embed, fork_server_pids, session_mb, worker_pids
from benchmarks.servers import Server, ServerFailure
from benchmarks.several import Canaries, ModelTable, serving_all, write_config
from vecd.base.target import parse_target

_MAX_REQUESTS = 4000
_EVERY_S = 1.0
_REPLACED_WITHIN_S = 120.0
_POLL_S = 0.02
_REST_S = 2.0
"""Workers give memory back after a second without a batch."""

Disturb = Callable[[Server, threading.Event], int]
"""Does something to a server until the event is set; returns how often."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What came of the requests of each model in a span of time."""

    num_done: int
    """Kills, reloads or evictions."""
    models: Mapping[str, Summary]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A server of several models, one of which is disturbed, while clients of each have all responses checked."""

    canaries: Sequence[Canaries]
    victim: str
    num_clients: int
    """Of each model."""
    pause_s: float
    """Between a client's requests, on average."""
    settle_s: float
    """Before the first stretch."""
    stretch_s: float
    num_slices: int
    """Of each kind of stretch, one after the other in turns: whatever else the machine does meets all of them."""
    folder: Path
    flags: Sequence[str] = ()
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(_MAX_REQUESTS))
    """Settings of the victim, each of which is another one."""

    def run(self, disturbances: Mapping[str, Disturb]) -> dict[str, list[Stretch]]:
        """Stretches of each of `disturbances`, and of none under "quiet". Raises ServerFailure when a disturbance
        cannot be done."""
        tables = [canaries.table for canaries in self.canaries]
        stretches: dict[str, list[Stretch]] = {name: [] for name in ("quiet", *disturbances)}
        with serving_all(tables, self.folder, *self.flags) as server, ExitStack() as stack:
            callers = {
                canaries.table.name: stack.enter_context(
                    Callers(server, canaries.questions(server), self.num_clients, self.pause_s)
                )
                for canaries in self.canaries
            }
            time.sleep(self.settle_s)
            for _ in range(self.num_slices):
                stretches["quiet"].append(self._stretch(server, callers, None))
                for name, disturb in disturbances.items():
                    stretches[name].append(self._stretch(server, callers, disturb))
        return stretches

    def _stretch(self, server: Server, callers: Mapping[str, Callers], disturb: Disturb | None) -> Stretch:
        began_at_s, has_ended, num_done = time.perf_counter(), threading.Event(), 0
        timer = threading.Timer(self.stretch_s / self.num_slices, has_ended.set)
        timer.start()
        try:
            num_done = disturb(server, has_ended) if disturb is not None else 0
            has_ended.wait()
        finally:
            timer.cancel()
        ended_at_s = time.perf_counter()
        time.sleep(self.settle_s)  # what came before the end is not of the next one
        return Stretch(num_done, {name: each.between(began_at_s, ended_at_s) for name, each in callers.items()})

    # --- disturbances -----------------------------------------------------------------------------------------

    def kill(self, server: Server, has_ended: threading.Event) -> int:
        """SIGKILL for a worker of the victim each second."""
        rng, num_killed = random.Random(1), 0
        while not has_ended.wait(_EVERY_S):
            pids = sorted(worker_pids(server, self.victim))
            if pids:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    num_killed += 1
        return num_killed

    def reload(self, server: Server, has_ended: threading.Event) -> int:
        """SIGHUP with another table of the victim, a second after the reload before."""
        num_reloaded = 0
        while not has_ended.wait(_EVERY_S):
            tables = {canaries.table.name: canaries.table for canaries in self.canaries}
            victim = tables[self.victim]
            settings = {**victim.settings, "max-requests": next(self._numbers)}
            write_config(
                self.folder / "vecd.toml", list((tables | {victim.name: replace(victim, settings=settings)}).values())
            )
            before = worker_pids(server, self.victim)
            os.kill(server.session, signal.SIGHUP)
            _await_replaced(server, self.victim, before)
            num_reloaded += 1
        return num_reloaded

    def unload(self, server: Server, has_ended: threading.Event) -> int:
        """The victim is unloaded, and loaded again by its own clients' requests, a second after the load before."""
        num_unloaded = 0
        while not has_ended.wait(_EVERY_S):
            before = worker_pids(server, self.victim)
            command(server, self.victim, "unload")
            _await_replaced(server, self.victim, before)
            num_unloaded += 1
        return num_unloaded


def _await_replaced(server: Server, model: str, before: set[int]) -> None:
    """Return once `model` has workers, none of which is among `before`. Raises ServerFailure when that takes too
    long."""
    deadline_s = time.perf_counter() + _REPLACED_WITHIN_S
    while not (pids := worker_pids(server, model)) or pids & before:
        if time.perf_counter() > deadline_s:
            raise ServerFailure(f"{model} has no new workers after {_REPLACED_WITHIN_S:g} s")
        time.sleep(_POLL_S)


# --- more models than memory ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Loads:
    """The fork servers that a server has had: each load of a model starts one."""

    pids: set[int] = field(default_factory=set)

    @contextmanager
    def watching(self, server: Server) -> Iterator["Loads"]:
        """Look every few milliseconds, from now until the end; those that are there already are not counted."""
        before, has_ended = fork_server_pids(server), threading.Event()

        def watch() -> None:
            while not has_ended.wait(_POLL_S):
                self.pids.update(fork_server_pids(server) - before)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield self
        finally:
            has_ended.set()
            thread.join()


def memory_of(table: ModelTable, folder: Path, *flags: str) -> tuple[float, float]:
    """MB at rest (PSS) of a server whose only model is not loaded, and what it has more once that is. Raises
    ServerFailure."""
    unloaded = replace(table, settings={**table.settings, "load": "demand"})
    with serving_all([unloaded], folder, *flags) as server:
        time.sleep(_REST_S)
        before_mb = session_mb(server)
        embed(server, ["a short text"])
        time.sleep(_REST_S)
        return before_mb, session_mb(server) - before_mb


@dataclass(frozen=True, slots=True)
class Crowded:
    """What came of models of which not all fit into the memory."""

    models: Mapping[str, Summary]
    elapsed_s: float
    num_loads: int

    @property
    def loads_per_min(self) -> float:
        return 60 * self.num_loads / self.elapsed_s


def crowd_out(
    canaries: Sequence[Canaries], budget: int, num_clients: int, duration_s: float, folder: Path, *flags: str
) -> Crowded:
    """Have models that are loaded on demand within `budget` bytes asked by `num_clients` each for `duration_s`, and
    until the last response. Raises ServerFailure."""
    tables = [replace(one.table, settings={**one.table.settings, "load": "demand"}) for one in canaries]
    limit = ("--memory-budget", str(budget))
    with serving_all(tables, folder, *limit, *flags) as server, Loads().watching(server) as loads:
        began_at_s = time.perf_counter()
        with ExitStack() as stack:
            callers = {
                one.table.name: stack.enter_context(Callers(server, one.questions(server), num_clients))
                for one in canaries
            }
            time.sleep(duration_s)
        ended_at_s = time.perf_counter()
        summaries = {name: each.between(began_at_s, ended_at_s) for name, each in callers.items()}
    return Crowded(summaries, ended_at_s - began_at_s, len(loads.pids))


def load_once(canaries: Canaries, num_requests: int, folder: Path, *flags: str) -> int:
    """How many loads `num_requests` cause that come at the same time for a model that is not loaded, beside one that
    is. Raises ServerFailure when one of them has no vectors."""
    resident = replace(canaries.table, name="resident")
    table = replace(canaries.table, settings={**canaries.table.settings, "load": "demand"})
    with serving_all([resident, table], folder, *flags) as server:
        target = parse_target(server.url)
        requests = [table.render(target, canaries.texts[n % len(canaries.texts)]) for n in range(num_requests)]
        with Loads().watching(server) as loads:
            send_all(target, requests, num_requests)
            time.sleep(_REST_S)
        return len(loads.pids)
