"""Clients that take their time, on purpose: a head, a body, or the reading of an answer, a byte at a time.

Run by tests on their own loop, or, where they must not disturb what is measured, as a process of its own:
`python slowclients.py '{"port": 8000, "kinds": {"head": 100}, ...}'` prints what became of each as JSON.
"""

import asyncio
import json
import select
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

_RECEIVE_BUFFER_BYTES = 4096
"""So that the kernels between client and server do not read the answer for it."""


@dataclass
class End:
    """What became of a slow client."""

    kind: str
    after_s: float
    """From its first byte to the server's end of the connection."""
    answer: str
    """The status line that it got, or ""."""


async def run_slow_clients(
    port: int, kinds: dict[str, int], *, interval_s: float, large: bytes, body_line: bytes, give_up_s: float
) -> list[End]:
    """So many of each kind ("head", "body", "reader"), until the server has ended each; each sends or reads a byte per
    `interval_s`. `large` is a request with a large answer, `body_line` the first line of a request with a body."""
    clients = []
    for kind, num in kinds.items():
        clients += [_slow_client(port, kind, interval_s, large, body_line, give_up_s) for _ in range(num)]
    return await asyncio.gather(*clients)


async def _slow_client(
    port: int, kind: str, interval_s: float, large: bytes, body_line: bytes, give_up_s: float
) -> End:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    if kind == "reader":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    with sock:
        await loop.sock_connect(sock, ("127.0.0.1", port))
        began_at = time.monotonic()
        begin = {
            "head": b"GET /live HTTP/1.1\r\nHost: x\r\nX: ",
            "body": body_line + b"\r\nHost: x\r\nContent-Length: 100000\r\n\r\n",
            "reader": large,
        }[kind]
        answer = b""
        with suppress(ConnectionError):
            await loop.sock_sendall(sock, begin)
            async with asyncio.timeout(give_up_s):
                if kind == "reader":
                    while not _is_cut(sock):
                        await loop.sock_recv(sock, 1)
                        await asyncio.sleep(interval_s)
                else:
                    answer = await _drip(sock, interval_s)
        return End(kind, time.monotonic() - began_at, answer.partition(b"\r\n")[0].decode("latin-1"))


def _is_cut(sock: socket.socket) -> bool:
    """Whether the server has ended the connection, though the kernel may have bytes of it to read."""
    poll = select.poll()
    poll.register(sock.fileno(), 0)
    return bool(poll.poll(0))


async def _drip(sock: socket.socket, interval_s: float) -> bytes:
    """Send a byte now and then, until the server answers or closes; returns all that it says."""
    loop = asyncio.get_running_loop()
    receiving = asyncio.ensure_future(loop.sock_recv(sock, 65536))
    while not (await asyncio.wait([receiving], timeout=interval_s))[0]:
        await loop.sock_sendall(sock, b"x")
    answer = await receiving
    while data := await loop.sock_recv(sock, 65536):
        answer += data
    return answer


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    options["large"], options["body_line"] = options["large"].encode(), options["body_line"].encode()
    print(json.dumps([asdict(end) for end in asyncio.run(run_slow_clients(**options))]))
