"""The end of a server: load balancers are told first, and an operator can look at it until the last response."""

import re
import signal
import socket
import time
from contextlib import suppress

import httpx

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


def status_of(operator: httpx.Client, path: str) -> int:
    """Asked again where the other gateway had the connection, and has ended, having nothing left to answer."""
    with suppress(httpx.RemoteProtocolError, httpx.ReadError):
        return operator.get(path).status_code
    return operator.get(path).status_code


def test_health_turns_before_anything_is_refused_and_the_admin_listener_answers_to_the_end() -> None:
    flags = ("--engine", "dummy", "--workers", "1", "--gateways", "2", "--admin-port", "0", "--drain-grace", "2")
    with running_server(*flags) as server:
        found = re.search(r"admin +(http:\S+)", server.stderr)
        assert found is not None
        with (
            httpx.Client(base_url=found[1], timeout=30) as operator,
            socket.create_connection(("127.0.0.1", server.port), timeout=30) as client,
        ):
            client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n")
            client.sendall(b"Content-Length: %d\r\n\r\n" % len(BODY))
            assert client.recv(1000).startswith(b"HTTP/1.1 100")
            client.sendall(BODY[:-3])
            assert operator.get("/health").status_code == 200

            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: {httpx.get(f"{server.url}/health").status_code for _ in range(10)} == {503})
            asked_at = time.monotonic()
            assert httpx.get(f"{server.url}/health").json()["reason"] == "the server is shutting down"
            ready = httpx.get(f"{server.url}/v2/health/ready")  # KServe's
            assert ready.status_code == 503
            assert ready.json() == {"ready": False, "reason": "the server is shutting down"}
            assert httpx.get(f"{server.url}/v2/health/live").json() == {"live": True}
            for _ in range(5):  # each on a connection of its own
                assert len(server.embed("still served")) == 1

            eventually(lambda: is_closed(server))
            assert time.monotonic() - asked_at > 1
            for _ in range(4):
                assert status_of(operator, "/health") == 503
                assert status_of(operator, "/metrics") == 200
            client.sendall(BODY[-3:])
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert server.process.wait(STOP_TIMEOUT_S) == 0
