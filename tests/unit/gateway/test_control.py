"""How a gateway reads the messages of its supervisor, and how it reports to it."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import cast

import pytest

from tests.support.supervision import VIRTUAL_TIME
from vecd.gateway.main import Control
from vecd.shm.control import (
    Activate,
    Channel,
    Discard,
    Drain,
    Heartbeat,
    Message,
    NewKeys,
    Prepared,
    Ready,
    Retired,
    WorkerUp,
)
from vecd.shm.wire import Incarnation


@pytest.fixture
def anyio_backend():
    return VIRTUAL_TIME


@pytest.fixture
async def channel() -> "FakeChannel":
    return FakeChannel()


@pytest.fixture
async def control(channel: "FakeChannel") -> Control:
    return Control(cast(Channel, channel))


class FakeChannel:
    """A supervisor that has said `messages`, and reads reports while it `reads`."""

    def __init__(self, *messages: tuple[Message, list[int]] | Exception | None) -> None:
        self.messages = [*messages]
        self.reads: bool | Exception = True
        self.sent: list[Message] = []
        self._eventfd = os.eventfd(0)

    def fileno(self) -> int:
        return self._eventfd

    def receive(self, timeout_s: float) -> tuple[Message, list[int]] | None:
        assert timeout_s == 0
        if not self.messages:
            raise BlockingIOError
        message = self.messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, message: Message, *, waits: bool) -> None:
        assert not waits
        if isinstance(self.reads, Exception):
            raise self.reads
        if not self.reads:
            raise BlockingIOError
        self.sent.append(message)


async def obeyed(
    *messages: tuple[Message, list[int]] | Exception | None,
    obey: Callable[[Message, list[int]], None] = lambda message, fds: None,
    exit: Callable[[int], object] = os._exit,
) -> list[tuple[Message, list[int]]]:
    """What was obeyed by the time that all messages were read."""
    calls: list[tuple[Message, list[int]]] = []

    def on_message(message: Message, fds: list[int]) -> None:
        calls.append((message, fds))
        obey(message, fds)

    control = Control(cast(Channel, FakeChannel(*messages)), exit)
    control.start(on_message)
    control.read()
    control.stop()
    return calls


@pytest.fixture
def fd() -> Iterator[int]:
    """The number of a descriptor; the test's own copy of it is closed afterwards, as often as it is open."""
    ours, theirs = socket.socketpair()
    number = ours.detach()
    yield number
    theirs.close()
    with suppress(OSError):
        os.close(number)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


async def test_all_messages_that_have_come_are_obeyed_in_order():
    messages: list[tuple[Message, list[int]]] = [(Activate(1), []), (Discard(0), []), (Drain(5.0, 1.0), [])]
    assert await obeyed(*messages) == messages


async def test_a_descriptor_is_closed_once_the_message_is_obeyed(fd):
    up = WorkerUp(1, Incarnation(0, 1), {})
    were_open: list[bool] = []
    assert await obeyed((up, [fd]), obey=lambda _, fds: were_open.append(is_open(fds[0]))) == [(up, [fd])]
    assert were_open == [True]
    assert not is_open(fd)


@pytest.mark.parametrize("error", [ValueError("not understood"), OSError("no descriptor left")])
async def test_a_message_that_cannot_be_read_ends_the_process(error):
    codes: list[int] = []
    assert await obeyed((Activate(1), []), error, exit=codes.append) == [(Activate(1), [])]
    assert codes == [70]


async def test_a_message_that_fails_ends_the_process_and_leaves_no_descriptor_open(fd):
    codes: list[int] = []

    def fail(message: Message, fds: list[int]) -> None:
        raise KeyError("a key without a digest")

    await obeyed((NewKeys([{"name": "a key without a digest"}]), [fd]), obey=fail, exit=codes.append)
    assert codes == [70]
    assert not is_open(fd)


async def test_nothing_is_read_any_more_once_the_supervisor_is_gone() -> None:
    channel = FakeChannel(None)
    control = Control(cast(Channel, channel))
    control.start(lambda message, fds: None)
    control.read()
    assert not asyncio.get_running_loop().remove_reader(channel.fileno())


async def test_messages_are_read_as_they_come() -> None:
    channel, obeyed = FakeChannel(), list[Message]()
    control = Control(cast(Channel, channel))
    control.start(lambda message, fds: obeyed.append(message))
    channel.messages.append((Activate(4), []))
    os.eventfd_write(channel.fileno(), 1)
    while not obeyed:
        await asyncio.sleep(0)
    assert obeyed == [Activate(4)]
    control.stop()


async def test_a_report_waits_until_the_supervisor_reads_again(channel: FakeChannel, control: Control):
    channel.reads = False
    control.send(Prepared(1))
    await asyncio.sleep(1.7)
    assert channel.sent == []
    channel.reads = True
    await asyncio.sleep(0.5)
    assert channel.sent == [Prepared(1)]
    await asyncio.sleep(10)
    assert channel.sent == [Prepared(1)], "it is sent once"


async def test_reports_that_had_to_wait_keep_their_order(channel: FakeChannel, control: Control):
    channel.reads = False
    control.send(Prepared(1))
    control.send(Prepared(2))
    channel.reads = True
    control.send(Prepared(3))
    await asyncio.sleep(1)
    control.send(Prepared(4))
    assert channel.sent == [Prepared(number) for number in (1, 2, 3, 4)]


async def test_a_report_to_a_supervisor_that_is_gone_is_dropped(channel: FakeChannel, control: Control):
    channel.reads = BrokenPipeError()
    control.send(Retired(1))
    channel.reads = True
    await asyncio.sleep(10)
    assert channel.sent == []


async def test_a_heartbeat_every_second_until_the_end(channel: FakeChannel, control: Control):
    control.send(Ready())
    control.start(lambda message, fds: None)
    assert channel.sent == [Ready(), Heartbeat()]
    await asyncio.sleep(3.5)
    assert channel.sent == [Ready(), *[Heartbeat()] * 4]
    channel.reads = False
    await asyncio.sleep(2)
    channel.reads = True
    await asyncio.sleep(1)
    assert channel.sent.count(Heartbeat()) == 5, "one that was missed is not made up for"
    control.stop()
    await asyncio.sleep(5)
    assert channel.sent.count(Heartbeat()) == 5
