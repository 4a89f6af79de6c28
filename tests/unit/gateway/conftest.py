"""A board, as two gateways have it."""

import os
from collections.abc import Iterator

import pytest

from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.shm.shared_metrics import ServiceKey, SharedMetricsSpec, create_shared_metrics


@pytest.fixture
def board_spec() -> SharedMetricsSpec:
    return SharedMetricsSpec(num_gateways=2, num_workers=3)


@pytest.fixture
def board_fd(board_spec: SharedMetricsSpec) -> Iterator[int]:
    fd = create_shared_metrics(board_spec)
    yield fd
    os.close(fd)


@pytest.fixture
def shared_metrics_of_all(board_fd: int, board_spec: SharedMetricsSpec) -> list[SharedMetrics]:
    """Each gateway's view of it, with one service."""
    views = [SharedMetrics.mapped(board_fd, board_spec, gateway) for gateway in range(2)]
    for view in views:
        view.open_service(ServiceKey(1))
        view.activate_service(ServiceKey(1))
    return views
