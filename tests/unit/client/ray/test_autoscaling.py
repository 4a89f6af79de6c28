"""The rule that adds and takes away replicas."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from vecd.client.ray.autoscaling import QUEUE_AGE, UTILIZATION, QueueAgePolicy


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
        ([0.0, 0.01], [0.0, 0.0], 2),
        ([0.0], [0.0], 1),
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
