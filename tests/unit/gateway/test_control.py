"""What a gateway does with each message of its supervisor, and how it reports to it."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest

from tests.support.virtualtime import run_in_virtual_time
from vecd.gateway.control import Control
from vecd.gateway.types.config import ApiKey
from vecd.shm.control import (
    Activate,
    Channel,
    Discard,
    Drain,
    GatewayReady,
    Heartbeat,
    InputDeaths,
    InputsCleared,
    Message,
    ModelBroken,
    NewKeys,
    Prepare,
    Prepared,
    Quarantined,
    Retired,
    WorkerDown,
    WorkerUp,
)

DEATHS = InputDeaths(["ab"], is_isolated=True, has_crashed=False)
KEY = {"name": "a", "digest": "00", "scopes": ["embed"], "max_priority": "bulk"}


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


class Recorded:
    """Generations that remember what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


def obeyed(*messages: tuple[Message, list[int]] | Exception | None) -> tuple[Recorded, list[tuple[float, float]]]:
    """What was called by the time that all messages were read."""
    generations, drains = Recorded(), list[tuple[float, float]]()

    async def test() -> None:
        control = Control(cast(Channel, FakeChannel(*messages)))
        control.start(generations, lambda *seconds: drains.append(seconds))
        control.read()
        control.stop()

    run_in_virtual_time(test)
    return generations, drains


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


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (ModelBroken(2, "why"), ("set_broken", 2, "why")),
        (Quarantined("ab"), ("add_to_quarantine", "ab")),
        (DEATHS, ("note_deaths", DEATHS)),
        (InputsCleared(["ab"]), ("note_cleared", ["ab"])),
        (NewKeys([KEY]), ("set_keys", (ApiKey("a", "00", ("embed",), "bulk"),))),
        (NewKeys([]), ("set_keys", ())),
        (Activate(3), ("activate", 3)),
        (Discard(3), ("discard", 3)),
    ],
)
def test_a_message_becomes_one_call(message, call):
    generations, drains = obeyed((message, []))
    assert (generations.calls, drains) == ([call], [])


def test_the_whole_message_is_passed_on_where_it_has_many_parts():
    down = WorkerDown(1, 2, "killed", has_crashed=True)
    assert obeyed((down, []))[0].calls == [("worker_down", down)]


def test_a_drain_is_the_process_s():
    generations, drains = obeyed((Drain(5.0, 1.0), []))
    assert (generations.calls, drains) == ([], [(5.0, 1.0)])


def test_all_messages_that_have_come_are_obeyed_in_order():
    generations, _ = obeyed((Activate(1), []), (Discard(0), []), (Activate(2), []))
    assert generations.calls == [("activate", 1), ("discard", 0), ("activate", 2)]


def test_a_descriptor_is_closed_once_the_message_is_obeyed(fd):
    up = WorkerUp(1, 0, 1, {})
    generations, _ = obeyed((up, [fd]))
    assert generations.calls == [("worker_up", up, fd)]
    assert not is_open(fd)


def test_a_listening_socket_is_handed_over_as_a_copy(fd):
    inode = os.fstat(fd).st_ino
    order = Prepare(1, {})
    generations, _ = obeyed((order, [fd]))
    [(name, message, listening)] = generations.calls
    assert (name, message) == ("prepare", order)
    assert not is_open(fd)
    assert os.fstat(listening.fileno()).st_ino == inode
    listening.close()


@pytest.mark.parametrize("error", [ValueError("not understood"), OSError("no descriptor left")])
def test_a_message_that_cannot_be_read_ends_the_process(monkeypatch, error):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    generations, _ = obeyed((Activate(1), []), error)
    assert (codes, generations.calls) == ([70], [("activate", 1)])


def test_a_message_that_fails_ends_the_process_and_leaves_no_descriptor_open(monkeypatch, fd):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    obeyed((NewKeys([{"name": "a key without a digest"}]), [fd]))
    assert codes == [70]
    assert not is_open(fd)


def test_nothing_is_read_any_more_once_the_supervisor_is_gone():
    async def test() -> None:
        channel = FakeChannel(None)
        control = Control(cast(Channel, channel))
        control.start(Recorded(), lambda *_: None)
        control.read()
        assert not asyncio.get_running_loop().remove_reader(channel.fileno())

    run_in_virtual_time(test)


def test_messages_are_read_as_they_come():
    async def test() -> None:
        channel, generations = FakeChannel(), Recorded()
        control = Control(cast(Channel, channel))
        control.start(generations, lambda *_: None)
        channel.messages.append((Activate(4), []))
        os.eventfd_write(channel.fileno(), 1)
        while not generations.calls:
            await asyncio.sleep(0)
        assert generations.calls == [("activate", 4)]
        control.stop()

    run_in_virtual_time(test)


def test_a_report_waits_until_the_supervisor_reads_again():
    async def test() -> None:
        channel = FakeChannel()
        channel.reads = False
        control = Control(cast(Channel, channel))
        control.send(Prepared(1))
        await asyncio.sleep(1.7)
        assert channel.sent == []
        channel.reads = True
        await asyncio.sleep(0.5)
        assert channel.sent == [Prepared(1)]
        await asyncio.sleep(10)
        assert channel.sent == [Prepared(1)], "it is sent once"

    run_in_virtual_time(test)


def test_a_report_to_a_supervisor_that_is_gone_is_dropped():
    async def test() -> None:
        channel = FakeChannel()
        channel.reads = BrokenPipeError()
        control = Control(cast(Channel, channel))
        control.send(Retired(1))
        channel.reads = True
        await asyncio.sleep(10)
        assert channel.sent == []

    run_in_virtual_time(test)


def test_a_heartbeat_every_second_until_the_end():
    async def test() -> None:
        channel = FakeChannel()
        control = Control(cast(Channel, channel))
        control.send(GatewayReady())
        control.start(Recorded(), lambda *_: None)
        assert channel.sent == [GatewayReady(), Heartbeat()]
        await asyncio.sleep(3.5)
        assert channel.sent == [GatewayReady(), *[Heartbeat()] * 4]
        channel.reads = False
        await asyncio.sleep(2)
        channel.reads = True
        await asyncio.sleep(1)
        assert channel.sent.count(Heartbeat()) == 5, "one that was missed is not made up for"
        control.stop()
        await asyncio.sleep(5)
        assert channel.sent.count(Heartbeat()) == 5

    run_in_virtual_time(test)
