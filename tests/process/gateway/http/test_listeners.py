"""How listening sockets are shared by gateways, and closed: two listeners on one socket, in one event loop."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from vecd.gateway.http.listeners import SharedListener, refuse_connects
from vecd.shm.control import file_id

DEADLINE_S = 10.0


class Connections:
    """One gateway's. Every connection is told whose it is."""

    def __init__(self, sock: socket.socket, is_ahead: Callable[[], bool]) -> None:
        self.num = 0
        self.num_asked = 0
        self._is_ahead = is_ahead
        self.listener = SharedListener(sock.dup(), lambda: Connection(self), self._ask)

    def _ask(self) -> bool:
        self.num_asked += 1
        return self._is_ahead()


class Connection(asyncio.Protocol):
    def __init__(self, ours: Connections) -> None:
        self._ours = ours

    def connection_made(self, transport) -> None:
        self._ours.num += 1
        self.sock = transport.get_extra_info("socket")
        no_delay = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.write(b"hello" if no_delay else b"slow!")
        transport.close()


async def connect(port: int) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = await reader.read()
        writer.close()
    return answer


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as sock:
        yield sock


@pytest.fixture
def port(sock: socket.socket) -> int:
    number: int = sock.getsockname()[1]
    return number


@pytest.mark.parametrize("num_clients", [2, 20])
async def test_connections_that_come_at_once_are_shared_evenly(num_clients, sock, port):
    both: list[Connections] = []
    both.append(Connections(sock, lambda: both[0].num > both[1].num))
    both.append(Connections(sock, lambda: both[1].num > both[0].num))
    answers = await asyncio.gather(*(connect(port) for _ in range(num_clients)))
    assert answers == [b"hello"] * num_clients
    assert [connections.num for connections in both] == [num_clients // 2] * 2
    for connections in both:
        connections.listener.close()


async def test_who_is_ahead_accepts_what_nobody_else_does(sock, port):
    alone = Connections(sock, lambda: True)
    assert await asyncio.gather(*(connect(port) for _ in range(5))) == [b"hello"] * 5
    assert alone.num_asked == 5, "it steps back once for each"
    alone.listener.close()


@pytest.mark.parametrize("is_ahead", [True, False])
async def test_nothing_is_accepted_after_the_close(is_ahead, sock, port):
    closed = Connections(sock, lambda: is_ahead)
    connecting = asyncio.ensure_future(connect(port))
    while is_ahead and not closed.num_asked:
        await asyncio.sleep(0)
    closed.listener.close()
    await asyncio.sleep(0.02)
    assert closed.num == 0
    other = Connections(sock, lambda: False)
    assert await connecting == b"hello"
    assert other.num == 1
    other.listener.close()


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


def connect_now(family: int, address) -> socket.socket:
    sock = socket.socket(family)
    sock.settimeout(10)
    sock.connect(address)
    return sock


def test_who_is_connected_is_served_and_who_comes_later_is_refused(listening):
    where = listening.family, listening.getsockname()
    early = [connect_now(*where) for _ in range(5)]
    uds_id = file_id(where[1]) if listening.family == socket.AF_UNIX else None
    refuse_connects(listening, uds_id)
    late: list[OSError | None] = []

    def come_late() -> None:
        try:
            connect_now(*where).close()
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
