"""Three hundred connections that ask for 2,048 vectors each and read nothing: the gateway's memory stays within its
bound, honest clients of the same address are answered, and the memory goes back."""

import http.client
import json
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.serving import running_server
from tests.support.soak.faults import own_memory_bytes
from tests.support.soak.form import only_long, record

pytestmark = [only_long, pytest.mark.timeout(600)]

NUM_SILENT, NUM_HONEST = 300, 60
BOUND_MB, MOST_LEFT_MB = 512, 150
BODY = json.dumps({"input": ["text"] * 2048}).encode()
REQUEST = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


def test_three_hundred_clients_that_read_nothing():
    with running_server("--engine", "weightless", "--workers", "1") as server:
        ask(server.port)
        gateway, over, sampled = server.gateway(), threading.Event(), []

        def memory_mb() -> float:
            return own_memory_bytes(gateway) / 1e6

        def watch() -> None:
            while not over.wait(0.05):
                sampled.append(memory_mb())

        start_mb = memory_mb()
        watching = threading.Thread(target=watch)
        watching.start()
        silent = [connect(server.port) for _ in range(NUM_SILENT)]
        time.sleep(3)
        began_at = time.monotonic()
        try:
            with ThreadPoolExecutor(8) as pool:
                statuses = Counter(pool.map(ask, [server.port] * NUM_HONEST))
            honest_s = time.monotonic() - began_at
            time.sleep(max(0.0, 35 - honest_s))
        finally:
            over.set()
            watching.join()
            for sock in silent:
                sock.close()
        time.sleep(60)
        record(
            "slow readers",
            start_mb=round(start_mb),
            growth_mb=round(max(sampled) - start_mb),
            left_mb=round(memory_mb() - start_mb),
            honest=dict(statuses),
            honest_s=round(honest_s, 1),
        )
        assert statuses == {200: NUM_HONEST}
        assert max(sampled) - start_mb <= 1.2 * BOUND_MB
        assert memory_mb() - start_mb <= MOST_LEFT_MB
        assert server.gateway().pid == gateway.pid


def connect(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(REQUEST)
    return sock


def ask(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/embeddings", BODY)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status
