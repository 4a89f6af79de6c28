import socket
import threading

import pytest

from vecd.gateway.http.drain_listener import refuse_connects
from vecd.shm.socketfile import file_id


@pytest.fixture(params=["tcp", "unix"])
def listening(request, tmp_path):
    if request.param == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as sock:
            yield sock
    else:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(tmp_path / "sock"))
            sock.listen()
            yield sock


def connect(family: int, address) -> socket.socket:
    sock = socket.socket(family)
    sock.settimeout(10)
    sock.connect(address)
    return sock


def test_who_is_connected_is_served_and_who_comes_later_is_refused(listening):
    where = listening.family, listening.getsockname()
    early = [connect(*where) for _ in range(5)]
    uds_id = file_id(where[1]) if listening.family == socket.AF_UNIX else None
    refuse_connects(listening, uds_id)
    late: list[OSError | None] = []

    def come_late() -> None:
        try:
            connect(*where).close()
            late.append(None)
        except OSError as error:
            late.append(error)

    thread = threading.Thread(target=come_late)
    thread.start()
    for client in early:
        client.sendall(b"request")
    accepted = [listening.accept()[0] for _ in early]
    listening.close()
    assert [sock.recv(100) for sock in accepted] == [b"request"] * 5
    thread.join(20)
    assert isinstance(late[0], ConnectionRefusedError | FileNotFoundError)
    for sock in [*early, *accepted]:
        sock.close()
