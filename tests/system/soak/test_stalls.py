"""What one client sends does not let all others wait: `/live` while four send what costs the loop most by the byte."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.serving import Server, running_server
from tests.support.soak.form import only_long, record

pytestmark = only_long

NUM_CLIENTS = 4
DURATION_S = 10.0
MOST_MS = 50.0

CHUNKED = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
COSTLY = {
    "chunks": CHUNKED + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n",
    "extensions": CHUNKED + b"1;a\r\nx\r\n" * 150_000 + b"0\r\n\r\n",
    "trailers": (CHUNKED + b"0\r\n" + b"A:\r\n" * 8_000 + b"\r\n") * 20,
    "pipelined": b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 5_000,
    "pipelined_openapi": b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 200,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--engine", "weightless", "--workers", "1") as running:
        yield running


@pytest.mark.parametrize("kind", COSTLY)
def test_costly_bytes_do_not_stall_the_loop(server: Server, kind: str):
    over = threading.Event()
    clients = [threading.Thread(target=send_again, args=(server.port, COSTLY[kind], over)) for _ in range(NUM_CLIENTS)]
    alone_ms = latencies_ms(server.port, DURATION_S / 5)
    for client in clients:
        client.start()
    try:
        beset_ms = latencies_ms(server.port, DURATION_S)
    finally:
        over.set()
        for client in clients:
            client.join()
    record(f"stalls: {kind}", alone_max_ms=round(alone_ms[-1], 1), beset_p50_ms=round(beset_ms[len(beset_ms) // 2], 1),
           beset_max_ms=round(beset_ms[-1], 1))  # fmt: skip
    assert beset_ms[-1] <= MOST_MS


def latencies_ms(port: int, duration_s: float) -> list[float]:
    """Of `/live`, on one connection, in ascending order."""
    connection, found, end = http.client.HTTPConnection("127.0.0.1", port), [], time.monotonic() + duration_s
    while time.monotonic() < end:
        began_at = time.perf_counter()
        connection.request("GET", "/live")
        assert connection.getresponse().read() is not None
        found.append((time.perf_counter() - began_at) * 1000)
        time.sleep(0.002)
    connection.close()
    return sorted(found)


def send_again(port: int, data: bytes, over: threading.Event) -> None:
    while not over.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            reading = threading.Thread(target=read_all, args=(sock,))
            reading.start()
            with suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            reading.join()


def read_all(sock: socket.socket) -> None:
    with suppress(OSError):
        while sock.recv(1 << 20):
            pass
