import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import rounds, vectors
from benchmarks.loads import GROUPS, Plan, Workload
from benchmarks.notebook import Notebook, Run
from benchmarks.recipes import Kitchen, Unavailable
from benchmarks.rounds import Comparison
from benchmarks.servers import Recipe, Server, ServerFailure
from benchmarks.vectors import OVERLONG_TEXTS, WrongVectors

VECTORS = np.eye(2, dtype=np.float32)


class Bench:
    """A comparison of servers that do not exist, and what it has done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, make_run) -> None:
        self.make_run = make_run
        self.overloaded: set[str] = set()
        self.num_asked: Counter[str] = Counter()
        self.log: list[str] = []
        self.vectors: dict[str, np.ndarray] = {}
        self.cuts_overlong = True
        self.broken_starts: dict[str, int] = {}
        self.servers = {name: self.recipe(name) for name in ("vecd-float32", "fast", "slow")}
        self.servers["absent"] = self.absent
        monkeypatch.setattr(rounds, "SERVERS", self.servers)
        monkeypatch.setattr(rounds, "serving", self.serving)
        monkeypatch.setattr(vectors, "embed", self.embed)
        monkeypatch.setattr(Comparison, "_measure", self.measure)
        plan = Plan(servers=list(self.servers), groups=["mixed", "short"], num_rounds=3, duration_s=1.0)
        self.notebook = Notebook(folder, "", {}, {})
        self.comparison = Comparison(plan, Kitchen(), self.notebook)

    def recipe(self, name: str):
        return lambda _: Recipe(name=name, command=("/somewhere/serve", "--port", "{port}"))

    def absent(self, _: Kitchen) -> Recipe:
        raise Unavailable("it is not on PATH")

    @contextlib.contextmanager
    def serving(self, recipe: Recipe) -> Iterator[Server]:
        if self.broken_starts.get(recipe.name):
            self.broken_starts[recipe.name] -= 1
            raise ServerFailure(f"{recipe.name} exited with 1 while starting:\nTraceback …")
        yield Server(recipe.name, 0)

    def embed(self, url: str, texts) -> np.ndarray:
        self.num_asked[url] += 1
        if texts is OVERLONG_TEXTS and url == "fast" and not self.cuts_overlong:
            raise WrongVectors("HTTP 500: too long")
        return self.vectors.get(url, VECTORS)

    def measure(self, name: str, _: Recipe, server: Server, workload: Workload, round_number: int) -> Run:
        if workload.name == "mixed":
            self.log.append(f"{name} {round_number}")
        errors = {"unanswered": 1} if name in self.overloaded else {}
        return self.make_run(name, workload.name, 1.0, errors=errors)

    def run(self) -> list[str]:
        self.comparison.run()
        return self.log


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_run) -> Bench:
    return Bench(monkeypatch, tmp_path, make_run)


def reasons(bench: Bench) -> list[tuple[str, int, bool, str]]:
    return [(one.server, one.round, one.is_out, one.reason) for one in bench.notebook.session.skipped]


def test_servers_take_turns_and_the_absent_are_left_out(bench: Bench) -> None:
    one_round = ["vecd-float32", "fast", "slow"]
    assert bench.run() == [f"{name} {number}" for number in (1, 2, 3) for name in one_round]
    assert reasons(bench) == [("absent", 0, True, "it is not on PATH")]
    assert [one.server for one in bench.notebook.session.measured] == one_round
    assert bench.notebook.session.measured[0].command == "serve --port PORT"


def test_who_embeds_something_else_is_not_measured(bench: Bench) -> None:
    bench.vectors["fast"] = VECTORS[::-1]
    assert not any(entry.startswith("fast") for entry in bench.run())
    assert reasons(bench)[1] == ("fast", 1, True, "cosine 0.0000 with vecd's vectors, less than 0.999")


def test_who_does_not_cut_long_texts_is_not_measured_with_them(bench: Bench) -> None:
    bench.cuts_overlong = False
    assert not any(entry.startswith("fast") for entry in bench.run())
    assert bench.notebook.session.skipped[1].workload == "mixed"
    assert "fast" in [one.server for one in bench.notebook.session.measured]


def test_who_fails_once_is_measured_in_the_next_round(bench: Bench) -> None:
    bench.broken_starts["slow"] = 1
    assert [entry for entry in bench.run() if entry.startswith("slow")] == ["slow 2", "slow 3"]
    assert reasons(bench)[1] == ("slow", 1, False, "slow exited with 1 while starting")


def test_who_fails_twice_is_out(bench: Bench) -> None:
    bench.broken_starts["slow"] = 2
    assert not any(entry.startswith("slow") for entry in bench.run())
    assert [one[1:3] for one in reasons(bench)[1:]] == [(1, False), (2, True)]


def test_who_is_behind_after_a_run_is_waited_for_before_the_next(bench: Bench) -> None:
    bench.overloaded.add("slow")
    bench.run()
    num_runs = len(Plan(servers=[], groups=["mixed", "short"], num_rounds=3, duration_s=1.0).workloads(1))
    assert bench.num_asked["slow"] - bench.num_asked["fast"] == 3 * (num_runs - 1)


def test_without_vecds_vectors_there_is_no_comparison(bench: Bench) -> None:
    bench.broken_starts["vecd-float32"] = 1
    with pytest.raises(ServerFailure, match="exited"):
        bench.run()
    assert bench.log == []


def test_the_engine_alone_gets_the_servers_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_run) -> None:
    plan = Plan(servers=["vecd"], groups=GROUPS, num_rounds=1, duration_s=1.0)
    notebook = Notebook(tmp_path / "results", "", {}, {})
    comparison = Comparison(plan, Kitchen(), notebook)
    asked: list[tuple] = []

    def measure_offline(*arguments: object) -> list:
        asked.append(arguments)
        return []

    monkeypatch.setattr(rounds, "measure_offline", measure_offline)
    comparison._measure_offline("vecd", 1, tmp_path)
    assert asked == []  # nothing is known of its batches
    run = make_run("vecd", "short-256", 1.0)
    notebook.add(Run(**{**{name: getattr(run, name) for name in run.__slots__}, "texts_per_batch": 31.6}))
    comparison._measure_offline("vecd", 1, tmp_path)
    comparison._measure_offline("infinity", 1, tmp_path)
    assert [arguments[:2] for arguments in asked] == [("bfloat16", {"short": 32})]
