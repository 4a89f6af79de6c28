from hypothesis import given
from hypothesis import strategies as st

from vecd.gateway.scheduling.cores import Cores


def test_all_idle_cores_may_be_lent_beside_the_first_of_a_batch():
    assert Cores(4).spare == 3


def test_lent_cores_come_back_with_the_answer():
    cores = Cores(4)
    cores.lease(3)
    assert (cores.free, cores.num_lent, cores.spare) == (1, 2, 0)
    cores.give_back(3)
    assert (cores.free, cores.num_lent, cores.spare) == (4, 0, 3)


def test_a_worker_with_another_batch_keeps_one_core():
    cores = Cores(4)
    cores.lease(3)
    cores.give_back(3, num_kept=1)
    assert (cores.free, cores.num_lent) == (3, 0)


def test_idle_workers_wait_while_all_cores_are_lent():
    cores = Cores(2)
    assert cores.places(1) == 1
    cores.lease(2)
    assert cores.places(1) == 0


def test_idle_workers_get_the_cores_that_a_lease_has_left():
    cores = Cores(4)
    cores.lease(2)
    assert cores.places(3) == 2


def test_more_workers_than_cores_all_get_a_batch_while_none_has_several():
    cores = Cores(2)
    cores.lease(1)
    cores.lease(1)
    assert (cores.places(3), cores.spare) == (3, -1)


def test_cores_that_another_program_uses_are_not_lent():
    cores = Cores(4)
    cores.others_use = 0.4  # a client of ours
    assert cores.spare == 3
    cores.others_use = 1.0
    assert cores.spare == 2
    cores.others_use = 9.0
    assert cores.spare < 0


def test_a_gateway_without_a_grant_lends_nothing_and_serves_all_the_same():
    cores = Cores(4)
    cores.granted = 0
    assert (cores.spare, cores.places(4)) == (-1, 4)


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
    cores.grant(1)
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
