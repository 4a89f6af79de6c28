"""The trials of several models as findings, and the models that they are made with.

Called by `benchmarks.models`; what is done to the server is in `benchmarks.trials`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.alone import compare
from benchmarks.checkpoints import save_mirrored
from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding
from benchmarks.servers import bundled_model
from benchmarks.several import Canaries, ModelTable, draw_requests, learn_canaries
from benchmarks.several_experiment import FEW, SeveralExperiment, figure
from benchmarks.targets import (
    BESIDE_QUIET,
    NONE_FAILED,
    ONE_LOAD,
)
from benchmarks.trials import Disturb, Stretch, Trial, crowd_out, load_once, memory_of

_BUDGET_MODELS = 2.5
"""Of three models of one size, with what workers need while they compute, two fit into a budget of so many."""
_NUM_AT_ONCE = 1000


def canaries_of(bench: SeveralExperiment) -> list[Canaries]:
    """Of an embedder, another one with other vectors, and a sparse model if there is one, else a reranker."""
    third = ModelTable("rerank", bench.reranker(), "rerank")
    if bench.sparse is not None:
        third = ModelTable("sparse", bench.sparse, "sparse")
    mirrored = bench.model("mirrored", save_mirrored)
    tables = [ModelTable("embed", Path(bundled_model())), ModelTable("mirrored", mirrored), third]
    folder = bench.scratch("canaries")
    return [
        learn_canaries(table, draw_requests(table, FEW, seed), folder, *bench.flags)
        for seed, table in enumerate(tables)
    ]


def make_trial(bench: SeveralExperiment) -> Trial:
    """With real models, the second of which is disturbed. Raises ServerFailure."""
    return Trial(
        canaries=canaries_of(bench),
        victim="mirrored",
        num_clients=4,
        pause_s=0.05,
        settle_s=2.0,
        stretch_s=bench.duration_s,
        num_slices=bench.num_rounds,
        folder=bench.scratch("trial"),
        flags=bench.flags,
    )


def disturbances_of(trial: Trial) -> Mapping[str, Disturb]:
    return {
        "killed each second": trial.kill,
        "reloaded": trial.reload,
        "unloaded and loaded again": trial.unload,
    }


def measure_trial(bench: SeveralExperiment) -> Iterator[Finding]:
    """The others while the workers of one model are killed, while it is reloaded, and while it is unloaded and loaded
    again. Raises ServerFailure."""
    trial = make_trial(bench)
    neighbours = Neighbours()
    for name, disturb in disturbances_of(trial).items():
        stretches = trial.run({name: disturb})
        yield from judge_trial(trial, name, stretches, neighbours.cores())


def judge_trial(
    trial: Trial, name: str, stretches: Mapping[str, Sequence[Stretch]], others_cores: float
) -> Iterator[Finding]:
    """What the stretches of one disturbance say of each of the other models."""
    quiet, disturbed = stretches["quiet"], stretches[name]
    num_done = sum(stretch.num_done for stretch in disturbed)
    for model in (canaries.table.name for canaries in trial.canaries):
        summaries = [stretch.models[model] for stretch in disturbed]
        bad = [failure for summary in summaries for failure in summary.failures]
        num_bad = len(bad) + sum(summary.num_refused for summary in summaries)
        num = num_bad + sum(summary.num_right for summary in summaries)
        work = f"{trial.victim} is {name} ({num_done} times): requests of {model} that failed, of {num:,}"
        yield figure("trial", work, "requests", num_bad, NONE_FAILED, others_cores, failures=bad[:5])
        if model != trial.victim:
            work = f"{trial.victim} is {name}: p99 of {model}"
            calm, busy = ([stretch.models[model].p99_ms for stretch in of] for of in (quiet, disturbed))
            facts = {"others_cores": others_cores}
            yield compare("models-trial", work, busy, "quiet stretches of the run", calm, BESIDE_QUIET, facts)


def measure_budget(bench: SeveralExperiment) -> Iterator[Finding]:
    """Three models on demand with memory for two, then many requests at once for one that is not loaded. Raises
    ServerFailure."""
    canaries = canaries_of(bench)
    folder = bench.scratch("budget")
    budget = bench.budget or budget_of_two(bench, canaries)
    neighbours = Neighbours()
    crowded = crowd_out(canaries, budget, 4, bench.duration_s, folder, *bench.flags)
    others_cores = neighbours.cores()
    what = f"three models on demand, budget of {budget / 1e6:.0f} MB, {bench.duration_s:g} s"
    for name, summary in crowded.models.items():
        num_bad = summary.num_refused + len(summary.failures)
        work = f"{what}: requests of {name} without an answer, of {num_bad + summary.num_right:,}"
        problems = summary.failures[:5]
        yield figure("budget", work, "requests", num_bad, NONE_FAILED, others_cores, failures=problems)
        longest_s = summary.max_ms / 1000
        yield figure("budget", f"{what}: longest wait of a request of {name}", "s", longest_s, None, others_cores)
    yield figure("budget", f"{what}: loads", "loads/min", crowded.loads_per_min, None, others_cores)
    num_loads = load_once(canaries[0], _NUM_AT_ONCE, folder, *bench.flags)
    work = f"{_NUM_AT_ONCE:,} requests at once for a model that is not loaded: loads"
    yield figure("budget", work, "loads", num_loads, ONE_LOAD, others_cores)


def budget_of_two(bench: SeveralExperiment, canaries: Sequence[Canaries]) -> int:
    """Bytes for two models of the first one's size, but not for three. Raises ServerFailure."""
    server_mb, model_mb = memory_of(canaries[0].table, bench.scratch("budget"), *bench.flags)
    return round(1e6 * (server_mb + _BUDGET_MODELS * model_mb))
