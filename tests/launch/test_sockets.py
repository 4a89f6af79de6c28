"""Whom listening sockets let in, and that no other server's is taken."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.failure import StartFailure
from launch.settings import Settings
from launch.sockets import listen, listen_admin


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


def settings(**fields: object) -> Settings:
    return Settings.model_validate(fields)


def can_connect(sock: socket.socket) -> bool:
    with socket.socket(sock.family) as client:
        client.settimeout(10)
        client.connect(sock.getsockname())
        return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_tcp_on_a_free_port(host, close):
    sock, url = listen(settings(host=host, port=0))
    close(sock)
    assert can_connect(sock)
    address, port = sock.getsockname()[:2]
    assert url == (f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}")


def test_the_url_says_that_tls_is_spoken(close, tmp_path):
    sock, url = listen(settings(port=0, tls_cert=tmp_path / "cert", tls_key=tmp_path / "key"))
    close(sock)
    assert url.startswith("https://127.0.0.1:")
    found = listen_admin(settings(admin_port=0, tls_cert=tmp_path / "cert", tls_key=tmp_path / "key"))
    assert found is not None
    close(found[0])
    assert found[1].startswith("http://127.0.0.1:")


def test_a_port_that_is_taken(close):
    sock, _ = listen(settings(port=0))
    close(sock)
    port = sock.getsockname()[1]
    with pytest.raises(StartFailure, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        listen(settings(port=port))


def test_an_address_that_is_not_ours():
    with pytest.raises(StartFailure, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign requested address"):
        listen(settings(host="192.0.2.1", port=0))


def test_without_a_setting_there_is_no_admin_socket():
    assert listen_admin(settings()) is None


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_unix_socket_is_for_its_owner_alone_whatever_the_umask(umask, close, tmp_path):
    before = os.umask(umask)
    try:
        public, public_url = listen(settings(uds=tmp_path / "public"))
        found = listen_admin(settings(admin_uds=tmp_path / "admin"))
    finally:
        os.umask(before)
    assert found is not None
    admin, admin_url = found
    assert (public_url, admin_url) == (f"unix:{tmp_path}/public", f"unix:{tmp_path}/admin")
    for sock in (close(public), close(admin)):
        assert can_connect(sock)
        assert stat.S_IMODE(Path(sock.getsockname()).stat().st_mode) == 0o600


def test_a_file_that_a_dead_server_has_left_is_replaced(close, tmp_path):
    path = tmp_path / "s"
    sock, _ = listen(settings(uds=path))
    sock.close()
    assert path.is_socket()
    assert can_connect(close(listen(settings(uds=path))[0]))


def test_a_socket_that_somebody_listens_on_is_not_taken(close, tmp_path):
    path = tmp_path / "s"
    sock = close(listen(settings(uds=path))[0])
    with pytest.raises(StartFailure, match=f"cannot listen on {path}: Address already in use"):
        listen(settings(uds=path))
    assert can_connect(sock)


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path):
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(StartFailure):
        listen(settings(uds=path))
    assert path.read_text() == "precious"


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(StartFailure, match="No such file or directory"):
        listen_admin(settings(admin_uds=tmp_path / "none" / "s"))
