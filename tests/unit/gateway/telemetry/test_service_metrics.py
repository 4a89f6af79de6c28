"""What a gateway counts of workers while it has more than one service, as in a reload."""

from itertools import count

import pytest

from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.shm.shared_metrics import SERVICES_PER_MODEL, BatchCell, ServiceKey, SharedMetricsSpec, WorkerCell, WorkerKey
from vecd.shm.wire import Incarnation

SPEC = SharedMetricsSpec(num_gateways=2, num_workers=2)
FIRST, REFUSED, NEXT = ServiceKey(1), ServiceKey(2), ServiceKey(3)


class Gateway:
    """One gateway's part of a server's shared metrics."""

    def __init__(self, memory: bytearray, index: int, service: ServiceKey) -> None:
        self.metrics = SharedMetrics(memoryview(memory).cast("q"), SPEC, index)
        self.places: dict[ServiceKey, int] = {}
        self.open(service)
        self.metrics.activate_service(service)

    def open(self, service: ServiceKey) -> None:
        self.places[service] = self.metrics.open_service(service)

    def up(self, service: ServiceKey, worker: int, life: int) -> None:
        self.metrics.worker_up(key(service, worker, life))

    def do_batches(self, service: ServiceKey, worker: int, num: int = 1) -> None:
        for _ in range(num):
            number = self.metrics.next_batch_number()
            self.metrics.batch_sent(number, worker, 1, 10, 100)
            self.metrics.batch_done(number, worker, 1, 10, 500, 0, self.places[service])


def key(service: ServiceKey, worker: int, life: int) -> WorkerKey:
    return WorkerKey(service, Incarnation(worker, life))


@pytest.fixture
def memory() -> bytearray:
    return bytearray(SPEC.nbytes)


@pytest.fixture
def gateways(memory: bytearray) -> list[Gateway]:
    """Two that have served with worker 0."""
    made = [Gateway(memory, index, FIRST) for index in range(2)]
    for gateway in made:
        gateway.up(FIRST, 0, 1)
        gateway.do_batches(FIRST, 0, 3)
    return made


def test_a_service_that_is_discarded_changes_nothing_of_the_one_that_serves(gateways: list[Gateway]):
    for gateway in gateways:
        gateway.open(REFUSED)
        gateway.up(REFUSED, 0, 2)
        gateway.do_batches(FIRST, 0)
    for gateway in gateways:
        gateway.metrics.close_service(REFUSED)
        gateway.do_batches(FIRST, 0)
    for gateway in gateways:
        assert gateway.metrics.worker_life(0) == 1
        assert gateway.metrics.worker_batches_in(key(FIRST, 0, 1)) == 2 * 5
        assert gateway.metrics.worker_batches_in(key(REFUSED, 0, 2)) == 0


def test_an_active_service_s_lives_count_and_those_of_the_one_before_no_more(gateways: list[Gateway]):
    for gateway in gateways:
        gateway.open(NEXT)
        gateway.up(NEXT, 0, 2)
        gateway.up(NEXT, 1, 1)
    assert gateways[0].metrics.known_workers() == [0]
    for gateway in gateways:
        gateway.metrics.activate_service(NEXT)
        gateway.up(FIRST, 0, 3)
        gateway.do_batches(NEXT, 0)
    metrics = gateways[1].metrics
    assert metrics.known_workers() == [0, 1]
    assert metrics.worker_life(0) == 2
    assert metrics.worker_batches_in(key(NEXT, 0, 2)) == 2
    assert metrics.worker_total(0, WorkerCell.BATCHES) == 2 * 4, "over all services"
    gateways[0].metrics.close_service(FIRST)
    gateways[0].up(NEXT, 0, 4)
    assert metrics.worker_life(0) == 4


def test_a_place_is_cleared_before_another_service_has_it(gateways: list[Gateway]):
    gateway = gateways[0]
    gateway.open(REFUSED)
    gateway.up(REFUSED, 0, 2)
    gateway.up(REFUSED, 1, 7)
    gateway.do_batches(REFUSED, 1)
    gateway.metrics.close_service(REFUSED)
    gateway.open(NEXT)
    gateway.up(NEXT, 0, 2)
    gateway.metrics.activate_service(NEXT)
    assert gateway.metrics.known_workers() == [0]
    assert gateway.metrics.worker_batches_in(key(NEXT, 0, 2)) == 0
    assert gateway.metrics.worker_batches_in(key(NEXT, 1, 7)) == 0


def test_a_gateway_s_next_life_counts_on_in_the_services_that_it_has_again(gateways: list[Gateway], memory: bytearray):
    gateways[0].open(NEXT)
    gateways[0].up(NEXT, 0, 2)
    gateways[0].do_batches(NEXT, 0, 2)
    successor = Gateway(memory, 0, NEXT)
    successor.up(NEXT, 0, 2)
    successor.do_batches(NEXT, 0)
    assert gateways[1].metrics.worker_batches_in(key(NEXT, 0, 2)) == 3
    assert gateways[1].metrics.worker_batches_in(key(FIRST, 0, 1)) == 2 * 3


def test_there_is_no_place_for_one_service_more(gateways: list[Gateway]):
    for generation in range(2, SERVICES_PER_MODEL + 1):
        gateways[0].open(ServiceKey(generation))
    with pytest.raises(ValueError, match="at most 2 services"):
        gateways[0].open(ServiceKey(99))


def test_numbers_of_batches_are_unique_over_all_services(gateways: list[Gateway]):
    gateways[0].open(NEXT)
    for service in (FIRST, NEXT, FIRST):
        gateways[0].up(service, 1, 1)
        gateways[0].do_batches(service, 1)
    ours = [batch for batch in gateways[1].metrics.recent_batches(0) if batch[0] == 0]
    assert [batch[1 + BatchCell.NUMBER] for batch in ours] == [number for number, _ in zip(count(1), ours)]
    assert len(ours) == 6
