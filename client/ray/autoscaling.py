"""When Ray Serve adds a node's vecd, and when it takes one away: by the age of the queue, never by processor use.

Owns the rule. How long it must hold before it counts is Serve's `upscale_delay_s` and `downscale_delay_s`. Imports no
Ray.
"""

from typing import Any

QUEUE_AGE = "vecd_queue_age_seconds"
"""How long the oldest sequence has waited, s."""
UTILIZATION = "vecd_utilization"
"""Seconds of computing per second and worker, 0 to 1."""


class QueueAgePolicy:
    """One replica more while the mean age of the queues is above `max_age_s`; one less while all queues are empty and
    the rest would be busy for less than `max_utilization` of the time."""

    def __init__(self, max_age_s: float = 0.5, max_utilization: float = 0.5) -> None:
        self._max_age_s, self._max_utilization = max_age_s, max_utilization

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas that is wanted, and Serve's state unchanged. `context`: Ray's `AutoscalingContext`."""
        return self._desired(context), context.policy_state

    def _desired(self, context: Any) -> int:
        target: int = context.target_num_replicas
        metrics = context.aggregated_metrics or {}
        ages = list(metrics.get(QUEUE_AGE, {}).values())
        # While one starts or ends, its effect is not seen yet.
        if context.current_num_replicas != target or not ages or len(ages) < target:
            return target
        # The mean: one slow node is not a full fleet.
        if sum(ages) / len(ages) > self._max_age_s:
            return target + 1
        busy = sum(metrics.get(UTILIZATION, {}).values())
        is_idle = max(ages) == 0 and target > 1 and busy / (target - 1) < self._max_utilization
        return target - is_idle
