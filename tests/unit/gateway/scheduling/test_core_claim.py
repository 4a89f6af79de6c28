"""What one of several gateways says about cores, and when."""

from collections.abc import Callable

from vecd.gateway.scheduling.core_claim import CoreClaim
from vecd.gateway.scheduling.cores import Cores
from vecd.shm.control import CoresHeld, CoresWanted, Message


class FakeGatewayClock:
    """A gateway's budget with its claim, and a clock that a test advances."""

    def __init__(self, num_cores: int = 8) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.num_waiting = 0
        self.sent: list[Message] = []
        self.cores = Cores(num_cores)
        self.claim = CoreClaim(
            self.cores, num_waiting=lambda: self.num_waiting, send=self.sent.append, call_later=self.call_later
        )

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, call))

    def wait(self, seconds: float) -> list[Message]:
        """Let time pass; what was sent meanwhile."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= until]:
            timer = min(due, key=lambda timer: timer[0])
            self.timers.remove(timer)
            self.now = timer[0]
            timer[1]()
        self.now = until
        return self.taken()

    def taken(self) -> list[Message]:
        sent = list(self.sent)
        self.sent.clear()
        return sent


def test_without_a_grant_a_batch_gets_one_core() -> None:
    gateway = FakeGatewayClock()
    assert gateway.cores.spare < 0
    assert gateway.cores.places(3) == 3
    gateway.claim.grant(4)
    assert gateway.cores.spare == 3


def test_the_first_batch_wants_a_core_and_the_last_one_gives_it_up_after_half_a_second() -> None:
    gateway = FakeGatewayClock()
    assert gateway.wait(10) == []
    assert not gateway.timers, "an idle gateway does nothing"
    gateway.cores.lease(1)
    assert gateway.wait(0) == [CoresWanted(1)]
    gateway.cores.give_back(1)
    for _ in range(20):  # one request after the other
        gateway.cores.lease(1)
        gateway.cores.give_back(1)
        assert gateway.wait(0.2) == []
    assert gateway.wait(0.25) == []
    assert gateway.wait(0.3) == [CoresWanted(0)]
    assert not gateway.timers
    gateway.cores.lease(1)
    assert gateway.wait(0) == [CoresWanted(1)]


def test_what_waits_counts_and_the_number_is_at_most_that_of_the_cores() -> None:
    gateway = FakeGatewayClock()
    gateway.cores.lease(1)
    gateway.num_waiting = 3
    assert gateway.wait(0) == [CoresWanted(4)]
    gateway.num_waiting = 300
    assert gateway.wait(0.1) == [CoresWanted(8)]
    gateway.num_waiting = 0
    assert gateway.wait(0.4) == [], "it may come back"
    assert gateway.wait(0.2) == [CoresWanted(1)]


def test_lent_cores_are_not_batches() -> None:
    gateway = FakeGatewayClock()
    gateway.claim.grant(8)
    gateway.cores.lease(5)
    assert gateway.wait(0) == [CoresWanted(1)]


def test_small_changes_of_a_large_number_are_not_sent() -> None:
    gateway = FakeGatewayClock(64)
    for _ in range(40):
        gateway.cores.lease(1)
    assert gateway.wait(0) == [CoresWanted(40)]
    for _ in range(4):
        gateway.cores.lease(1)
    assert gateway.wait(1) == []
    gateway.cores.lease(1)
    assert gateway.wait(1) == [CoresWanted(45)]


def test_at_most_twenty_messages_a_second() -> None:
    gateway = FakeGatewayClock(1000)
    num_sent = 0
    for step in range(1, 1001):
        gateway.num_waiting = 2 * step if step % 7 else 0
        gateway.cores.lease(1)
        num_sent += len(gateway.wait(0.001))
    assert 5 < num_sent <= 21


def test_a_smaller_grant_is_confirmed_as_soon_as_leases_fit_into_it() -> None:
    gateway = FakeGatewayClock()
    gateway.claim.grant(8)
    gateway.claim.grant(6)
    assert gateway.taken() == [CoresHeld(6)], "nothing is leased"
    gateway.cores.lease(4)
    gateway.cores.lease(1)
    gateway.claim.grant(2)
    assert gateway.wait(1) == [CoresWanted(2)]
    assert gateway.cores.spare < 0, "no more cores are lent"
    gateway.cores.give_back(1)
    assert gateway.taken() == []
    gateway.cores.give_back(4)
    assert gateway.taken() == [CoresHeld(2)]
    gateway.cores.lease(2)
    gateway.cores.give_back(2)
    assert gateway.taken() == [], "once"


def test_batches_on_one_core_need_no_grant() -> None:
    gateway = FakeGatewayClock()
    gateway.claim.grant(8)
    for _ in range(3):
        gateway.cores.lease(1)
    gateway.claim.grant(0)
    assert gateway.taken() == [CoresHeld(0)]


def test_a_larger_grant_is_not_confirmed() -> None:
    gateway = FakeGatewayClock()
    gateway.claim.grant(3)
    gateway.claim.grant(3)
    gateway.claim.grant(8)
    assert gateway.taken() == []
