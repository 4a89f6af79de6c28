"""An operator can look at a server until its very end."""

import re
import signal
import socket
from contextlib import suppress

import httpx
import pytest

from tests.support.serving import STOP_TIMEOUT_S, Server, eventually, running_server

BODY = b'{"input": "hi"}'


def is_closed(server: Server) -> bool:
    try:
        httpx.get(f"{server.url}/live", timeout=10)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        pass
    return False


def status_of(operator: httpx.Client, path: str, gateways: str) -> int:
    """Asked again where another gateway had the connection, and has ended, having nothing left to answer."""
    if gateways != "1":
        with suppress(httpx.RemoteProtocolError, httpx.ReadError):
            return operator.get(path).status_code
    return operator.get(path).status_code


@pytest.mark.parametrize("gateways", ["1", "2"])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_the_admin_listener_answers_while_the_last_requests_are_awaited(kind, gateways, tmp_path):
    path = tmp_path / "admin"
    where = ("--admin-port", "0") if kind == "tcp" else ("--admin-uds", str(path))
    flags = ("--engine", "weightless", "--workers", "1", "--gateways", gateways, "--drain-grace", "0.1")
    with running_server(*flags, *where) as server:
        found = re.search(r"admin +(http:\S+)", server.stderr)
        url = found[1] if found is not None else "http://admin"
        transport = httpx.HTTPTransport(uds=str(path)) if kind == "unix" else None
        with (
            httpx.Client(base_url=url, transport=transport, timeout=30) as operator,
            socket.create_connection(("127.0.0.1", server.port), timeout=30) as client,
        ):
            client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n")
            client.sendall(b"Content-Length: %d\r\n\r\n" % len(BODY))
            assert client.recv(1000).startswith(b"HTTP/1.1 100")
            client.sendall(BODY[:-3])
            assert operator.get("/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: is_closed(server))
            for _ in range(4):
                assert status_of(operator, "/health", gateways) == 503
                assert status_of(operator, "/metrics", gateways) == 200
            client.sendall(BODY[-3:])
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert server.process.wait(STOP_TIMEOUT_S) == 0
    assert not path.exists()
