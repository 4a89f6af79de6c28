"""The cores of one gateway: who has them, what it says about them, and what other programs use."""

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.gateway.scheduling.cores import CoreClaim, Cores, OtherPrograms
from vecd.shm.control import CoresHeld, CoresWanted, Message


@pytest.mark.parametrize(
    ("num_cores", "leases", "num_lent", "spare", "num_places"),
    [
        (4, [], 0, 3, 3),
        pytest.param(4, [3], 2, 0, 1, id="the others get what a lease has left"),
        (4, [2], 1, 1, 2),
        pytest.param(2, [2], 1, -1, 0, id="idle workers wait while all cores are lent"),
        pytest.param(2, [1], 0, 0, 3, id="more workers than cores all get a batch while none has several"),
        (2, [1, 1], 0, -1, 3),
    ],
)
def test_idle_workers_get_the_cores_that_leases_have_left(num_cores, leases, num_lent, spare, num_places):
    cores = Cores(num_cores)
    for num in leases:
        cores.lease(num)
    assert (cores.free, cores.num_lent, cores.spare) == (num_cores - sum(leases), num_lent, spare)
    assert cores.places(3) == num_places
    for num in leases:
        cores.give_back(num)
    assert (cores.free, cores.num_lent) == (num_cores, 0)


def test_cores_that_another_program_uses_are_not_lent():
    cores = Cores(4)
    cores.others_use = 0.4  # a client of ours
    assert cores.spare == 3
    cores.others_use = 1.0
    assert cores.spare == 2
    cores.others_use = 9.0
    assert cores.spare < 0


def test_contention_is_forgotten():
    cores = Cores(2)
    assert not cores.is_contended(0.0)
    cores.note_contention(10.0, batch_s=0.01)
    assert cores.is_contended(10.07)
    assert not cores.is_contended(10.09)
    cores.note_contention(20.0, batch_s=5.0)
    assert cores.is_contended(21.9)
    assert not cores.is_contended(22.1)


def test_a_moment_is_quiet_a_second_after_two_batches_have_met():
    cores = Cores(2)
    assert cores.is_quiet(0.0)
    cores.lease(1)
    assert not cores.is_quiet(5.0)  # the batch has the machine, and the next one would not
    cores.give_back(1)
    assert cores.is_quiet(5.0)
    cores.note_meeting(10.0)
    assert not cores.is_quiet(10.9)
    assert cores.is_quiet(11.1)
    cores.note_contention(20.0, batch_s=0.01)
    assert not cores.is_quiet(20.9)


def test_a_moment_is_not_quiet_while_other_gateways_have_work():
    cores = Cores(2)
    cores.granted = 1
    assert not cores.is_quiet(0.0)


@given(st.lists(st.integers(1, 8), max_size=20), st.integers(0, 1))
def test_nothing_is_left_leased_at_the_end(leases, num_kept):
    cores = Cores(8)
    for num in leases:
        cores.lease(num)
    for num in leases:
        cores.give_back(num, num_kept)
        cores.give_back(num_kept)
    assert (cores.leased, cores.num_lent) == (0, 0)


# --- what one of several gateways says about cores, and when ---------------------------------------------------------


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
    gateway.claim.grant(3)
    gateway.claim.grant(3)
    gateway.claim.grant(8)
    assert gateway.taken() == [], "a larger one is not"
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
    for _ in range(3):
        gateway.cores.lease(1)
    gateway.claim.grant(0)
    assert gateway.taken() == [CoresHeld(0)], "batches on one core need none"


# --- other programs ---------------------------------------------------------------------------------------------------

OURS = 77


class Proc:
    """A /proc whose processors have been busy for so many ticks."""

    def __init__(self, folder):
        self.folder = folder
        (folder / str(OURS)).mkdir()
        self.write(busy=0, ours=0)

    def write(self, *, busy, ours):
        cpus = sorted(os.sched_getaffinity(0))
        lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]
        # user nice system idle iowait irq softirq steal guest guest_nice
        lines += [f"cpu{cpu} {busy if cpu == cpus[0] else 0} 0 0 999 999 0 0 0 {busy} 0" for cpu in cpus]
        lines += [f"cpu{max(cpus) + 1} 123456 0 0 0 0 0 0 0 0 0", "intr 1 2 3", "cpu0 9 9 9"]
        (self.folder / "stat").write_text("\n".join(lines))
        fields = ["0"] * 50
        fields[13], fields[14] = str(ours // 2), str(ours - ours // 2)
        (self.folder / str(OURS) / "stat").write_text(f"{OURS} (vecd (a) b) " + " ".join(fields[2:]))


@pytest.fixture
def proc(tmp_path):
    return Proc(tmp_path)


def test_what_our_own_processes_use_is_not_counted(proc):
    programs = OtherPrograms(proc.folder)
    assert programs.read(100.0, [OURS, 999_999]) == 0
    proc.write(busy=180, ours=80)
    assert programs.read(102.0, [OURS]) == pytest.approx(0.5)
    assert programs.num_cpus == len(os.sched_getaffinity(0))


def test_readings_are_a_second_apart(proc):
    programs = OtherPrograms(proc.folder)
    programs.read(100.0, [])
    proc.write(busy=100, ours=0)
    assert programs.read(100.5, []) == 0
    assert programs.read(101.0, []) == pytest.approx(1.0)


def test_a_process_that_is_new_counts_from_then_on(proc):
    programs = OtherPrograms(proc.folder)
    proc.write(busy=500, ours=500)
    programs.read(100.0, [])
    proc.write(busy=600, ours=600)
    assert programs.read(101.0, [OURS]) == pytest.approx(1.0)
    proc.write(busy=700, ours=700)
    assert programs.read(102.0, [OURS]) == 0


def test_a_kernel_that_says_nothing_leaves_the_machine_ours(tmp_path):
    assert OtherPrograms(tmp_path).read(100.0, [1]) == 0


def test_the_real_kernel_is_read():
    programs = OtherPrograms()
    programs.read(0.0, [os.getpid()])
    assert 0 <= programs.read(10.0, [os.getpid()]) <= programs.num_cpus
