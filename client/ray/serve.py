"""Ray Serve in HAProxy mode before the vecds of nodes: a replica per node passes bytes to the server that it owns.

Owns the deployment: where replicas are placed, how they are checked, counted and stopped. Computes nothing and parses
no body.
"""

import asyncio
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import LoggingConfig

from vecd.client.aio import AsyncClient
from vecd.client.exchanges import Piece
from vecd.client.ray.autoscaling import QUEUE_AGE, UTILIZATION, QueueAgePolicy
from vecd.client.ray.forward import Forwarder
from vecd.client.ray.node_server import NodeServer
from vecd.client.ray.start import missing

RESOURCE = "vecd"
"""The resource that a node offers with `--resources '{"vecd": 1}'`: a replica takes 1 of it."""
_MAX_ONGOING_REQUESTS = 10_000
"""vecd refuses what would wait too long, and Ray's default of 5 would starve its batches."""
_HEALTH_TIMEOUT_S = 3.0
_STOP_TIMEOUT_S = 60.0
_REPORT_INTERVAL_S, _LOOK_BACK_S = 1.0, 5.0
"""Serve's defaults of 10 and 30 s see an overload late. The interval is deprecated in favour of the variable that
`environment` sets, but Ray 2.60 still goes by it alone."""


@serve.ingress()
class Vecd:
    """A replica, and its node's vecd. Either ends with the other."""

    async def __init__(self, model: str | None, flags: Sequence[str]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Raises RuntimeError when the node's Ray was started without the environment, or vecd does not start."""
        if absent := missing():
            raise RuntimeError(
                f"{', '.join(absent)} not set: start every node with `python -m vecd.client.ray.start` (docs/ray.md)"
            )
        self._server = NodeServer(model, flags)
        await asyncio.to_thread(self._server.serve)
        self._public, self._admin = (
            AsyncClient(f"unix:{self._server.path(name)}", retry_for=0) for name in ("public", "admin")
        )
        self._computed_s, self._at = 0.0, time.monotonic()

    def __serve_build_asgi_app__(self) -> Forwarder:
        return Forwarder(self._server.path("public"))

    async def check_health(self) -> None:
        """HAProxy is told of the first."""
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            await self._public.answer(Piece("/health"))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for each report."""
        stats = await self._admin.answer(Piece("/stats"))
        now, computed_s, num_workers = time.monotonic(), stats["totals"]["compute_s"], max(1, len(stats["workers"]))
        busy = (computed_s - self._computed_s) / (now - self._at) / num_workers
        self._computed_s, self._at = computed_s, now
        return {QUEUE_AGE: stats["queue"]["age_s"], UTILIZATION: busy}

    async def __del__(self) -> None:
        if (server := getattr(self, "_server", None)) is not None:
            await asyncio.to_thread(server.stop)


def app(
    model: str | None = None,
    flags: Sequence[str] = (),
    *,
    min_replicas: int = 1,
    max_replicas: int | None = None,
    num_gpus: float = 0,
    upscale_delay_s: float = 30.0,
    downscale_delay_s: float = 600.0,
    max_queue_age_s: float = 0.5,
) -> serve.Application:
    """The application, for `serve.run`: `min_replicas` nodes, or up to `max_replicas` by the age of their queues.

    `model` and `flags` are those of `vecd serve`; without a model it is the bundled one. `num_gpus`: without any, Ray
    hides a node's GPUs from vecd. Raises ValueError for limits that do not go together.
    """
    if isinstance(flags, str):
        raise ValueError(f"flags: a list of words, not {flags!r}")
    policy = AutoscalingPolicy(policy_function=QueueAgePolicy, policy_kwargs={"max_age_s": max_queue_age_s})
    scaling: dict[str, Any] = {"num_replicas": min_replicas}
    if max_replicas is not None and max_replicas != min_replicas:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=min_replicas,
                max_replicas=max_replicas,
                upscale_delay_s=upscale_delay_s,
                downscale_delay_s=downscale_delay_s,
                metrics_interval_s=_REPORT_INTERVAL_S,
                look_back_period_s=_LOOK_BACK_S,
                policy=policy,
            )
        }
    deployment = serve.deployment(
        Vecd,
        # Without CPUs: the node's belong to vecd, which is no Ray process, and a replica that asked for one would take
        # the whole of a small node. One node has one replica because it has one unit of the resource.
        ray_actor_options={"num_cpus": 0, "num_gpus": num_gpus, "resources": {RESOURCE: 1}},
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        health_check_period_s=2.0,
        health_check_timeout_s=2 * _HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=_STOP_TIMEOUT_S,
        logging_config=LoggingConfig(enable_access_log=False),
        **scaling,
    )
    return deployment.bind(model, list(flags))


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """As `app`, for `serve run` and a configuration file: values may be texts, and `flags` one text of words.

    Raises ValueError for an unknown name, which Serve itself passes over in silence.
    """
    readers: dict[str, Callable[[Any], Any]] = {
        "model": str,
        "flags": lambda value: shlex.split(value) if isinstance(value, str) else list(value),
        **dict.fromkeys(("min_replicas", "max_replicas"), int),
        **dict.fromkeys(("num_gpus", "upscale_delay_s", "downscale_delay_s", "max_queue_age_s"), float),
    }
    if unknown := sorted(set(arguments) - set(readers)):
        raise ValueError(f"{', '.join(unknown)}: none of {', '.join(readers)}")
    return app(**{name: readers[name](value) for name, value in arguments.items()})
