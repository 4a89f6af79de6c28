"""The environment of Ray Serve, and the rule that adds and takes away replicas."""

import os
import stat
from dataclasses import dataclass, field
from typing import Any

import pytest

from vecd.client.ray import start
from vecd.client.ray.autoscaling import QUEUE_AGE, UTILIZATION, QueueAgePolicy
from vecd.client.ray.start import environment, missing


def test_variables_that_are_not_set_are_named(tmp_path, monkeypatch):
    assert missing() == list(environment())
    monkeypatch.setattr(os, "environ", {**environment(), "RAY_SERVE_HAPROXY_RETRIES": "9"})
    assert missing() == []
    added = {name: value for name, value in environment(tmp_path).items() if name not in environment()}
    assert len(added) == 5
    assert all(value.startswith(str(tmp_path)) for value in added.values()), "files of HAProxy"


def test_ray_is_started_with_them_but_what_is_set_wins(monkeypatch, tmp_path):
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/sh\n")
    ray.chmod(stat.S_IRWXU)
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("RAY_SERVE_HAPROXY_RETRIES", "9")
    start.main(["--head", "--port=1"])
    [(path, argv, variables)] = started
    assert (path, argv) == (str(ray), [str(ray), "start", "--head", "--port=1"])
    assert variables["RAY_SERVE_HAPROXY_RETRIES"] == "9"
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert variables["PATH"] == os.environ["PATH"]


@dataclass
class FakeContext:
    current_num_replicas: int
    target_num_replicas: int
    aggregated_metrics: dict[str, dict[str, float]] | None
    policy_state: dict[str, Any] = field(default_factory=dict)


def _metrics(ages: list[float], busy: list[float]) -> dict[str, dict[str, float]]:
    def by_replica(values):
        return {f"replica {n}": value for n, value in enumerate(values)}

    return {QUEUE_AGE: by_replica(ages), UTILIZATION: by_replica(busy)}


@pytest.mark.parametrize(
    ("ages", "busy", "wanted"),
    [
        ([0.6, 0.6], [1.0, 1.0], 3),
        ([0.9, 0.0], [1.0, 0.1], 2),  # one slow node is not a full fleet
        ([1.1, 0.0], [1.0, 0.1], 3),
        ([0.5, 0.5], [1.0, 1.0], 2),
        ([0.0, 0.0], [0.2, 0.2], 1),
        ([0.0, 0.0], [0.3, 0.3], 2),  # the one that is left would be busy for 0.6 of the time
    ],
)
def test_the_mean_age_of_the_queues_decides(ages, busy, wanted):
    context = FakeContext(len(ages), len(ages), _metrics(ages, busy), {"of Serve": 1})
    assert QueueAgePolicy(max_age_s=0.5, max_utilization=0.5)(context) == (wanted, {"of Serve": 1})


@pytest.mark.parametrize(
    "context",
    [
        FakeContext(1, 2, _metrics([9.0], [1.0])),  # the second one is starting
        FakeContext(2, 1, _metrics([9.0, 9.0], [1.0, 1.0])),  # the second one is ending
        FakeContext(2, 2, _metrics([9.0], [1.0])),  # the second one has reported nothing yet
        FakeContext(2, 2, None),
        FakeContext(0, 0, {}),
    ],
)
def test_nothing_changes_while_replicas_do_or_are_not_known(context):
    assert QueueAgePolicy()(context)[0] == context.target_num_replicas
