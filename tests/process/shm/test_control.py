import os

import pytest

from vecd.shm.control import Channel, Drain, Progress, WorkerUp
from vecd.shm.wire import Incarnation


@pytest.fixture
def channels():
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(channels):
    ours, theirs = channels
    ours.send(Drain(1.5, 0.5))
    ours.send(Progress("loading weights"))
    assert theirs.receive(1) == (Drain(1.5, 0.5), [])
    assert theirs.receive(1) == (Progress("loading weights"), [])


def test_a_descriptor_rides_along(channels):
    ours, theirs = channels
    reader, writer = os.pipe()
    ours.send(up := WorkerUp(1, Incarnation(0, 1), {}), [writer])
    os.close(writer)
    message, [received] = theirs.receive(1)
    os.write(received, b"x")
    assert (message, os.read(reader, 1)) == (up, b"x")
    assert not os.get_inheritable(received)
    os.close(received)
    os.close(reader)


def test_the_death_of_the_other_side_is_seen(channels):
    ours, theirs = channels
    ours.close()
    assert theirs.receive(1) is None
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.send(Drain(1, 0))


@pytest.mark.parametrize("timeout_s", [1, 0])
def test_what_a_side_has_sent_arrives_though_it_died_with_messages_unread(channels, timeout_s):
    ours, theirs = channels
    theirs.send(Drain(1.5, 0.5))
    ours.send(Progress("loading weights"))
    ours.close()
    assert theirs.receive(timeout_s) == (Progress("loading weights"), [])
    assert theirs.receive(timeout_s) is None


def test_waiting_ends_at_the_deadline(channels):
    with pytest.raises(TimeoutError):
        channels[0].receive(0.01)


def test_nothing_there_does_not_block(channels):
    with pytest.raises(BlockingIOError):
        channels[0].receive(0)


def test_a_long_message_travels_by_a_file(channels):
    ours, theirs = channels
    reader, writer = os.pipe()
    long = Progress("\u00e4\ud800" * 5_000_000)  # the texts of a job may have a file's size
    num_before = len(os.listdir("/proc/self/fd"))
    ours.send(long, [writer])
    message, [received] = theirs.receive(1)
    assert message == long
    os.write(received, b"y")
    assert os.read(reader, 1) == b"y"
    os.close(received)
    assert len(os.listdir("/proc/self/fd")) == num_before
    os.close(reader)
    os.close(writer)
