"""Whom listening sockets let in, that no other server's is taken, and which are handed over."""

import gc
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vecd.base.failures import ConfigurationError, StartFailure
from vecd.launch import sockets
from vecd.launch.sockets import Inherited, Listeners, take_inherited
from vecd.shm.settings import GivenSettings, Settings


@pytest.fixture
def close() -> Iterator[Callable[[socket.socket], socket.socket]]:
    """Remembers what the test has made, and closes it."""
    made: list[socket.socket] = []

    def remember(sock: socket.socket) -> socket.socket:
        made.append(sock)
        return sock

    yield remember
    for sock in made:
        sock.close()


def settings(**fields: Any) -> Settings:
    return replace(Settings(), **fields, given=GivenSettings(names=tuple(fields)))


def can_connect(sock: socket.socket) -> bool:
    with socket.socket(sock.family) as client:
        client.settimeout(10)
        client.connect(sock.getsockname())
        return True


@pytest.fixture
def listen(close) -> Callable[..., Listeners]:
    def listen(inherited: Inherited | None = None, **fields: Any) -> Listeners:
        made = Listeners(settings(**fields), inherited or Inherited())
        for sock in made.sockets:
            close(sock)
        return made

    return listen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_tcp_on_a_free_port(host, listen):
    made = listen(host=host, port=0)
    [sock] = made.sockets
    assert can_connect(sock)
    address, port = sock.getsockname()[:2]
    assert made.url == (f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}")


def test_a_port_that_is_taken(listen):
    port = listen(port=0).sockets[0].getsockname()[1]
    with pytest.raises(StartFailure, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        listen(port=port)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_unix_socket_is_for_its_owner_alone_whatever_the_umask(umask, listen, tmp_path):
    before = os.umask(umask)
    try:
        made = listen(uds=tmp_path / "public", admin_uds=tmp_path / "admin")
    finally:
        os.umask(before)
    assert (made.url, made.admin_url) == (f"unix:{tmp_path}/public", f"unix:{tmp_path}/admin")
    for sock in made.sockets:
        assert can_connect(sock)
        assert stat.S_IMODE(Path(sock.getsockname()).stat().st_mode) == 0o600


def test_a_file_that_a_dead_server_has_left_is_replaced(listen, tmp_path):
    path = tmp_path / "s"
    listen(uds=path).close_sockets()
    assert path.is_socket()
    assert can_connect(listen(uds=path).sockets[0])


def test_a_socket_that_somebody_listens_on_is_not_taken(listen, tmp_path):
    path = tmp_path / "s"
    [sock] = listen(uds=path).sockets
    with pytest.raises(StartFailure, match=f"cannot listen on {path}: Address already in use"):
        listen(uds=path)
    assert can_connect(sock)


def test_a_file_that_is_no_socket_is_not_replaced(listen, tmp_path):
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(StartFailure):
        listen(uds=path)
    assert path.read_text() == "precious"


def test_a_folder_that_does_not_exist(listen, tmp_path):
    with pytest.raises(StartFailure, match="No such file or directory"):
        listen(port=0, admin_uds=tmp_path / "none" / "s")


# --- handed over by systemd -----------------------------------------------------------------------------------


@pytest.fixture
def hand_over(monkeypatch):
    """Puts sockets where vecd looks for them, which here is far from what pytest has open. Returns the environment."""
    first = 500
    monkeypatch.setattr(sockets, "FIRST_INHERITED", first)

    def hand_over(*fds: int, names: str = "", pid: int | None = None) -> dict[str, str]:
        for number, fd in enumerate(map(os.dup, fds), start=first):
            os.dup2(fd, number)
            os.close(fd)
        return {"LISTEN_FDS": str(len(fds)), "LISTEN_PID": str(pid or os.getpid()), "LISTEN_FDNAMES": names, "X": "y"}

    yield hand_over
    gc.collect()  # a socket that an error refers to would close its number while the next test uses it
    for number in range(first, first + 4):
        with suppress(OSError):
            os.close(number)


@pytest.fixture
def listening(listen) -> socket.socket:
    return listen(port=0).sockets[0]


def test_the_public_and_the_admin_socket(hand_over, listening, listen, tmp_path):
    [admin] = listen(uds=tmp_path / "admin").sockets
    environ = hand_over(admin.fileno(), listening.fileno(), names="admin:vecd")
    found = take_inherited(settings(), environ)
    assert environ == {"X": "y"}
    assert found.public is not None
    assert found.admin is not None
    made = listen(found, port=1)
    assert made.sockets == [found.public, found.admin]
    assert (made.url, made.admin_url) == (f"http://127.0.0.1:{listening.getsockname()[1]}", f"unix:{tmp_path}/admin")
    assert not found.public.get_inheritable()
    assert not found.admin.get_inheritable()


def test_what_is_for_another_process_is_left_alone(hand_over, listening):
    environ = hand_over(listening.fileno(), pid=1)
    assert take_inherited(settings(), environ) == Inherited()
    assert environ == {"X": "y"}


@pytest.mark.parametrize("environ", [{}, {"LISTEN_PID": "self"}, {"LISTEN_FDS": "1"}])
def test_nothing_was_handed_over(environ):
    assert take_inherited(settings(), {name: str(os.getpid()) for name in environ}) == Inherited()


@pytest.mark.parametrize("number", ["x", "-1", "65", "1e1", "²", "9" * 5000])
def test_a_number_that_is_none(number):
    with pytest.raises(ConfigurationError, match="LISTEN_FDS: must be a number up to 64"):
        take_inherited(settings(), {"LISTEN_FDS": number, "LISTEN_PID": str(os.getpid())})


def test_two_public_sockets(hand_over, listening):
    with pytest.raises(ConfigurationError, match=r"at most one may be named admin, and one otherwise"):
        take_inherited(settings(), hand_over(listening.fileno(), listening.fileno(), names="vecd:vecd"))


def test_a_descriptor_that_is_closed(hand_over):
    with pytest.raises(ConfigurationError, match=r"descriptor 500 \(vecd\): was to be a socket: Bad file descriptor"):
        take_inherited(settings(), {**hand_over(names="vecd"), "LISTEN_FDS": "1"})


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("file", "was to be a socket"),
        ("datagram", r"is no stream socket \(ListenStream=\)"),
        ("connected", "does not listen: with Accept=yes"),
    ],
)
def test_what_is_no_listening_socket(kind, problem, hand_over, close, tmp_path):
    if kind == "file":
        with open(tmp_path / "file", "w") as file, pytest.raises(ConfigurationError, match=problem):
            take_inherited(settings(), hand_over(file.fileno()))
        return
    sock = close(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM))
    with pytest.raises(ConfigurationError, match=problem):
        take_inherited(settings(), hand_over(sock.fileno()))


def test_settings_that_say_otherwise_where_to_listen(hand_over, listening, tmp_path):
    given = settings(host="0.0.0.0", port=9000, uds=tmp_path / "s", admin_port=1)
    with pytest.raises(ConfigurationError) as raised:
        take_inherited(given, hand_over(listening.fileno(), listening.fileno(), names="vecd:admin"))
    assert [problem.partition(":")[0] for problem in raised.value.problems] == ["host", "port", "uds", "admin-port"]


def test_the_admin_socket_may_be_ours_where_the_public_one_is_not(hand_over, listening, close):
    found = take_inherited(settings(admin_port=0), hand_over(listening.fileno()))
    assert found.public is not None
    close(found.public)


def test_the_url_of_a_socket_without_a_file(close, listen):
    sock = close(socket.socket(socket.AF_UNIX))
    sock.bind(f"\0vecd-test-{os.getpid()}")
    assert listen(Inherited(sock)).url == f"unix:@vecd-test-{os.getpid()}"
