"""The rounds of a comparison: each server's turn, from its start to its stop.

Owns who is measured when, and what becomes of one that fails. Called by `benchmarks.compare`.
"""

import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import uvloop

from benchmarks import vectors
from benchmarks.cpu import CpuClock
from benchmarks.figures import dtype_of, of_rounds
from benchmarks.loads import CAPACITY, Plan, Workload, make_load
from benchmarks.notebook import Measured, Notebook, Run, Skipped
from benchmarks.offline import OfflineFailed, measure_offline
from benchmarks.recipes import SERVERS, Kitchen, Unavailable
from benchmarks.requests import info, session_mb
from benchmarks.sampling import BatchRate
from benchmarks.servers import Recipe, Server, ServerFailure, serving
from benchmarks.vectors import Vectors, WrongVectors
from vecd.client.bench import command as bench
from vecd.client.bench import report
from vecd.client.bench.load import Load, Unreachable
from vecd.client.bench.report import RunResult

_NAME_WIDTH = 17
_MAX_FAILURES = 2
_OFFLINE_WORKS: Mapping[str, str] = {"short": "short-256", "mixed": "mixed"}
"""Work of the engine alone → the workload whose batches it gets."""


@dataclass(slots=True)
class Comparison:
    """`run` once."""

    plan: Plan
    kitchen: Kitchen
    notebook: Notebook
    _recipes: dict[str, Recipe] = field(default_factory=dict)
    _failures: Counter[str] = field(default_factory=Counter)
    _checked: set[str] = field(default_factory=set)
    """Servers whose vectors have been compared with vecd's."""
    _cuts_overlong: set[str] = field(default_factory=set)
    """Servers whose vectors of texts longer than the model takes are vecd's, too."""

    def run(self) -> None:
        """Every round of every server. Side effects: the notebook has every run as soon as it has ended.

        Raises ServerFailure when vecd cannot be asked for the vectors that the others must have; KeyboardInterrupt on
        Ctrl-C. Of the servers that are measured it raises nothing: those that fail are left out.
        """
        self._recipes = {name: recipe for name in self.plan.servers if (recipe := self._make_recipe(name)) is not None}
        ours = self._ask_vecd()
        with tempfile.TemporaryDirectory(prefix="vecd-bench-") as folder:
            for round_number in range(1, self.plan.num_rounds + 1):
                for name in list(self._recipes):
                    self._attempt(name, round_number, ours)
                    # At once, while the machine is as fast as it was: within minutes that changes.
                    self._measure_offline(name, round_number, Path(folder))

    def _make_recipe(self, name: str) -> Recipe | None:
        try:
            return SERVERS[name](self.kitchen)
        except (Unavailable, ServerFailure) as error:
            self._skip(Skipped(server=name, reason=str(error)))
            return None

    def _ask_vecd(self) -> Mapping[str, Vectors]:
        try:
            with serving(SERVERS["vecd-float32"](self.kitchen)) as server:
                return {
                    "texts": vectors.embed(server.url, vectors.TEXTS),
                    "overlong": vectors.embed(server.url, vectors.OVERLONG_TEXTS),
                }
        except (Unavailable, WrongVectors) as error:
            raise ServerFailure(f"vecd gives no vectors to compare with: {error}") from error

    def _attempt(self, name: str, round_number: int, ours: Mapping[str, Vectors]) -> None:
        """One turn. A server that fails has one more chance, in the next round; one with other vectors has none."""
        try:
            self._turn(name, round_number, ours)
        except (ServerFailure, Unreachable, WrongVectors) as error:
            reason, _, details = str(error).partition("\n")
            print(details, file=sys.stderr)
            self._failures[name] += 1
            is_out = isinstance(error, WrongVectors) or self._failures[name] == _MAX_FAILURES
            self._skip(Skipped(server=name, reason=reason.rstrip(":"), round=round_number, is_out=is_out))
            if is_out:
                del self._recipes[name]

    def _skip(self, skipped: Skipped) -> None:
        print(
            f"{skipped.server} is left out{skipped.workload and f' of {skipped.workload}'}: {skipped.reason}",
            flush=True,
        )
        self.notebook.add(skipped)

    # --- one server's turn --------------------------------------------------------------------------------

    def _turn(self, name: str, round_number: int, ours: Mapping[str, Vectors]) -> None:
        recipe = self._recipes[name]
        print(
            f"\n{name}, round {round_number} of {self.plan.num_rounds}\n{'':{_NAME_WIDTH}}{report.heading()}",
            flush=True,
        )
        with serving(recipe) as server:
            if name not in self._checked:
                self._check(name, server, ours)
                self._checked.add(name)
                self.notebook.add(_describe(name, recipe))
            is_behind = False
            for workload in self.plan.workloads(round_number):
                if workload.has_long_texts and name not in self._cuts_overlong:
                    continue
                if is_behind:
                    _settle(server)
                run = self._measure(name, recipe, server, workload, round_number)
                is_behind = "unanswered" in run.figures["errors"]

    def _check(self, name: str, server: Server, ours: Mapping[str, Vectors]) -> None:
        """Raises WrongVectors, but not for texts longer than the model takes: then those are not measured."""
        vectors.require_same(ours["texts"], vectors.embed(server.url, vectors.TEXTS))
        try:
            vectors.require_same(ours["overlong"], vectors.embed(server.url, vectors.OVERLONG_TEXTS))
        except WrongVectors as error:
            reason = f"it does not cut texts where the model says: {error}"
            self._skip(Skipped(server=name, reason=reason, workload="mixed"))
        else:
            self._cuts_overlong.add(name)

    def _measure(self, name: str, recipe: Recipe, server: Server, workload: Workload, round_number: int) -> Run:
        capacities = of_rounds(self.notebook.session, name, CAPACITY, "requests_per_s")
        capacity = capacities[max(capacities)] if capacities else None
        load = make_load(workload, server.url, self.plan.duration_s, capacity)
        clock = CpuClock(server.session)
        if recipe.is_ours:
            with BatchRate(server, load.warmup_s, load.duration_s) as batches:
                result = _run(load, workload.name)
            batches_per_s = batches.per_s
        else:
            result, batches_per_s = _run(load, workload.name), None
        cpu = clock.lap()
        time.sleep(workload.rest_s)
        run = Run(
            server=name,
            round=round_number,
            workload=workload.name,
            figures=report.fields(result),
            server_cores=round(cpu.server, 3),
            others_cores=round(cpu.others, 3),
            memory_mb=round(session_mb(server), 1),
            texts_per_batch=round(result.per_s(result.num_texts) / batches_per_s, 1) if batches_per_s else None,
            info=_told(server) if recipe.is_ours else {},
        )
        if run.is_disturbed:
            print(f"{'':10}others used {run.others_cores:.2f} cores meanwhile", flush=True)
        self.notebook.add(run)
        return run

    # --- the engine alone ---------------------------------------------------------------------------------

    def _measure_offline(self, name: str, round_number: int, folder: Path) -> None:
        """In the server's number format and with the batches that it has just had; nothing if it is a peer."""
        dtype = dtype_of(self.notebook.session, name)
        sizes = {work: self._texts_per_batch(name, load, round_number) for work, load in _OFFLINE_WORKS.items()}
        batches = {work: size for work, size in sizes.items() if size}
        if dtype is None or not batches:
            return
        cache = folder / dtype
        cache.mkdir(exist_ok=True)
        try:
            for measured in measure_offline(dtype, batches, self.plan.offline_s, round_number, cache):
                print(f"engine {dtype}, {measured.work}: {measured.texts_per_s:.1f} texts/s", flush=True)
                self.notebook.add(measured)
        except OfflineFailed as error:
            self._skip(Skipped(server=f"the {dtype} engine alone", reason=str(error), round=round_number, is_out=False))

    def _texts_per_batch(self, name: str, workload: str, round_number: int) -> int:
        size = of_rounds(self.notebook.session, name, workload, "texts_per_batch").get(round_number, 0.0)
        return round(size)


def _run(load: Load, name: str) -> RunResult:
    """Raises ServerFailure when the run ends early, Unreachable, KeyboardInterrupt."""

    def tell(result: RunResult) -> None:
        print("\n".join([f"{name:<{_NAME_WIDTH}}{report.row(result)}", *report.notes(result)]), flush=True)

    [result] = uvloop.run(bench.run_loads([load], tell))
    match result.ended_early:
        case None:
            return result
        case bench.INTERRUPTED:
            raise KeyboardInterrupt
        case reason:
            raise ServerFailure(f"{name}: {reason}")


def _settle(server: Server) -> None:
    """Return once the server has answered what the last run left with it, which else the next run would wait for.

    It answers what comes last last, or nearly so. Raises ServerFailure when it does not answer at all.
    """
    try:
        vectors.embed(server.url, vectors.TEXTS)
    except WrongVectors as error:
        raise ServerFailure(f"after an overload: {error}") from error


def _told(server: Server) -> dict[str, Any]:
    """What of `/info` belongs to a run."""
    told = info(server)
    return {key: told[key] for key in ("limits", "workers") if key in told}


def _describe(name: str, recipe: Recipe) -> Measured:
    return Measured(
        server=name,
        version=recipe.version,
        # Names without folders: where this machine keeps things says nothing about the run.
        command=shlex.join(_last(part).format(port="PORT") for part in recipe.command),
        environment={variable: _last(value) for variable, value in recipe.environment.items()},
        remark=recipe.remark,
    )


def _last(part: str) -> str:
    return PurePath(part).name if part.startswith("/") and part.count("/") > 1 else part
