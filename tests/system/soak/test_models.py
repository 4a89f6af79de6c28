"""Several real models in one server: what is done to one of them fails no request of another, and models that do not
fit into the memory together all answer.

Every response is compared with what its model answers in a server of its own. In short,
tests/process/server/test_models_apart.py has the same with the dummy engine.
"""

import math
import os
from pathlib import Path

import pytest

from benchmarks.several_experiment import SeveralExperiment
from benchmarks.several_trials import budget_of_two, canaries_of, disturbances_of, make_trial
from benchmarks.trials import Stretch, crowd_out, load_once
from tests.support.models_trial import assert_all_right
from tests.support.soak.form import LONG, pick, record

pytestmark = pytest.mark.skipif(
    not LONG, reason="in short, tests/process/server/test_models_apart.py has the same: with VECD_SOAK=1"
)

DURATION_S = pick(short=2.0, long=60.0)
NUM_SLICES = pick(short=1, long=6)
NUM_AT_ONCE = pick(short=100, long=1000)
MAX_P99_RATIO = 1.5
MAX_WAIT_S = 60.0


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> SeveralExperiment:
    named = os.environ.get("SPLADE_TINY")
    return SeveralExperiment(
        num_rounds=NUM_SLICES,
        turn_s=0.0,
        duration_s=DURATION_S,
        flags=(),
        folder=tmp_path_factory.mktemp("several"),
        against=None,
        sparse=Path(named) if named else None,
        budget=None,
    )


@pytest.mark.parametrize("name", ["killed each second", "reloaded", "unloaded and loaded again"])
def test_the_others_do_not_notice(experiment: SeveralExperiment, name: str) -> None:
    trial = make_trial(experiment)
    stretches = trial.run({name: disturbances_of(trial)[name]})
    num_done = sum(stretch.num_done for stretch in stretches[name])
    others = [canaries.table.name for canaries in trial.canaries if canaries.table.name != trial.victim]
    p99_ms = {kind: {model: round(_p99_ms(of, model), 1) for model in others} for kind, of in stretches.items()}
    record(
        f"several models: one is {name}",
        times=num_done,
        requests=sum(summary.num_right for of in stretches[name] for summary in of.models.values()),
        p99_quiet_ms=p99_ms["quiet"],
        p99_meanwhile_ms=p99_ms[name],
    )
    assert num_done > 0
    for of in stretches.values():
        assert_all_right(of)
    for model in others:
        assert p99_ms[name][model] <= MAX_P99_RATIO * p99_ms["quiet"][model]


def _p99_ms(stretches: list[Stretch], model: str) -> float:
    """The median of the slices'."""
    ordered = sorted(stretch.models[model].p99_ms for stretch in stretches)
    return ordered[len(ordered) // 2] if ordered else math.inf


def test_more_models_than_memory_all_answer(experiment: SeveralExperiment) -> None:
    canaries = canaries_of(experiment)
    budget = budget_of_two(experiment, canaries)
    crowded = crowd_out(canaries, budget, 4, DURATION_S, experiment.scratch("budget"))
    record(
        "several models: memory for two of three",
        requests={name: summary.num_right for name, summary in crowded.models.items()},
        longest_wait_s={name: round(summary.max_ms / 1000, 1) for name, summary in crowded.models.items()},
        refused=sum(summary.num_refused for summary in crowded.models.values()),
        loads_per_min=round(crowded.loads_per_min, 1),
    )
    for name, summary in crowded.models.items():
        assert (name, summary.failures[:3], summary.num_refused) == (name, [], 0)
        assert summary.num_right > 0, name
        assert summary.max_ms < 1000 * MAX_WAIT_S, name


def test_many_requests_at_once_load_a_model_once(experiment: SeveralExperiment) -> None:
    [first, *_] = canaries_of(experiment)
    num_loads = load_once(first, NUM_AT_ONCE, experiment.scratch("once"))
    record("several models: many requests for one that is not loaded", requests=NUM_AT_ONCE, loads=num_loads)
    assert num_loads == 1
