"""Shared metrics, as two gateways have it."""

import os
from collections.abc import Iterator

import pytest

from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.shm.shared_metrics import SharedMetricsSpec, create_shared_metrics


@pytest.fixture
def metrics_spec() -> SharedMetricsSpec:
    return SharedMetricsSpec(num_gateways=2, num_workers=3)


@pytest.fixture
def metrics_fd(metrics_spec: SharedMetricsSpec) -> Iterator[int]:
    fd = create_shared_metrics(metrics_spec)
    yield fd
    os.close(fd)


@pytest.fixture
def shared_metrics_of_all(metrics_fd: int, metrics_spec: SharedMetricsSpec) -> list[SharedMetrics]:
    """Each gateway's view of it."""
    return [SharedMetrics.mapped(metrics_fd, metrics_spec, gateway) for gateway in range(2)]
