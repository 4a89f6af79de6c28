"""What is said to systemd, and that nothing goes wrong where nobody listens."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vecd.launch.systemd.notify import EXTEND_EVERY_S, Notifier, serving


@pytest.fixture(params=["path", "abstract"])
def listener(request, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """systemd's socket, and what NOTIFY_SOCKET says of it."""
    path = f"{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(path if request.param == "path" else f"\0{path}")
        sock.settimeout(10)
        yield sock, path if request.param == "path" else f"@{path}"


def heard(sock: socket.socket) -> list[str]:
    return sock.recv(4096).decode().split("\n")


def environment(address: str, **others: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": address, "PATH": "/bin", **others}


def test_each_message(listener):
    sock, address = listener
    notifier = Notifier.from_environment(environment(address))
    notifier.ready("Serving")
    assert heard(sock) == ["READY=1", "STATUS=Serving"]
    before_us = time.monotonic_ns() // 1000
    notifier.reloading("Reloading")
    first, clock, status = heard(sock)
    assert (first, status) == ("RELOADING=1", "STATUS=Reloading")
    name, _, number = clock.partition("=")
    assert name == "MONOTONIC_USEC"
    assert before_us <= int(number) <= time.monotonic_ns() // 1000
    notifier.stopping("Stopping", 2.5)
    assert heard(sock) == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=2500000", "STATUS=Stopping"]
    notifier.alive()
    assert heard(sock) == ["WATCHDOG=1"]
    notifier.extend()
    [extension] = heard(sock)
    assert int(extension.removeprefix("EXTEND_TIMEOUT_USEC=")) > 2 * EXTEND_EVERY_S * 1e6


def test_a_status_is_one_line_and_said_once(listener):
    sock, address = listener
    notifier = Notifier.from_environment(environment(address))
    notifier.status("one\nREADY=1\n two")
    notifier.status("one\nREADY=1\n two")
    notifier.status("x" * 10_000)
    assert heard(sock) == ["STATUS=one READY=1 two"]
    [long] = heard(sock)
    assert len(long) < 500


def test_the_variables_are_gone(listener):
    _, address = listener
    environ = environment(address, WATCHDOG_USEC="3000000", WATCHDOG_PID=str(os.getpid()))
    assert Notifier.from_environment(environ).watchdog_s == 3
    assert environ == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "500000"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "9" * 5000}, None),
    ],
)
def test_how_often_the_watchdog_wants_to_hear(variables, watchdog_s):
    assert Notifier.from_environment(environment("/run/notify", **variables)).watchdog_s == watchdog_s


@pytest.mark.parametrize(("watchdog_s", "interval_s"), [(None, 5), (30, 5), (2, 0.5), (1e-6, 0.05), (1e13, 5)])
def test_how_often_something_is_said(watchdog_s, interval_s):
    assert Notifier("/run/notify", watchdog_s).interval_s == interval_s


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "@nobody-listens-here", "x" * 200, "@" + "x" * 200, "a\0b"])
def test_nobody_who_listens_is_no_error(address):
    notifier = Notifier.from_environment(environment(address))
    notifier.ready("Serving")
    notifier.alive()
    with notifier.extending():
        pass


def test_a_listener_that_does_not_read_holds_nobody_up(listener):
    sock, address = listener
    notifier = Notifier(address)
    for _ in range(10_000):
        notifier.alive()
    assert heard(sock) == ["WATCHDOG=1"]


def full_of(sock: socket.socket, notifier: Notifier) -> int:
    """The listener has no room left. How many messages it has."""
    num_sent = 0
    while notifier.send("X=1"):
        num_sent += 1
    return num_sent


def test_what_is_said_once_is_said_later_to_a_listener_that_is_busy(listener):
    sock, address = listener
    notifier = Notifier(address)
    num_sent = full_of(sock, notifier)
    notifier.reloading("Reloading")
    notifier.ready("Serving")
    notifier.alive()
    assert [heard(sock) for _ in range(num_sent)] == [["X=1"]] * num_sent
    notifier.alive()
    assert heard(sock)[0] == "RELOADING=1"
    assert heard(sock) == ["READY=1", "STATUS=Serving"]
    assert heard(sock) == ["WATCHDOG=1"]


def test_a_status_that_was_not_taken_is_said_again(listener):
    sock, address = listener
    notifier = Notifier(address)
    num_sent = full_of(sock, notifier)
    notifier.status("Serving")
    assert [heard(sock) for _ in range(num_sent)] == [["X=1"]] * num_sent
    notifier.status("Serving")
    assert heard(sock) == ["STATUS=Serving"]


def test_more_time_is_asked_for_while_the_block_runs(listener):
    sock, address = listener
    with Notifier(address).extending():
        [extension] = heard(sock)
        assert extension.startswith("EXTEND_TIMEOUT_USEC=")


@pytest.mark.parametrize(
    ("ready", "workers", "broken", "refused", "status"),
    [
        (2, 2, None, "", "Serving m at http://x, 2 workers"),
        (1, 1, None, "", "Serving m at http://x, 1 worker"),
        (1, 2, None, "", "Serving m at http://x, 1 of 2 workers, the others are being started"),
        (0, 2, "it dies", "", "Cannot serve m: it dies"),
        (1, 2, "it dies", "", "Serving m at http://x, 1 of 2 workers, the others are being started"),
        (2, 2, None, "no folder", "Serving m at http://x, 2 workers; not reloaded: no folder"),
    ],
)
def test_the_status_of_a_server(ready, workers, broken, refused, status):
    assert serving([("m", ready, workers, broken)], "http://x", refused) == status


def test_the_status_of_a_server_of_several_models():
    first, second = ("a", 2, 2, None), ("b", 0, 1, None)
    assert serving([first, second], "http://x", "") == (
        "Serving a, b at http://x, 2 of 3 workers, the others are being started"
    )
    broken = ("b", 0, 1, "it dies")
    assert serving([first, broken], "http://x", "no folder") == (
        "Serving a at http://x, 2 workers; Cannot serve b: it dies; not reloaded: no folder"
    )
    assert serving([broken], "http://x", "") == "Cannot serve b: it dies"
