"""A closed loop of many connections whose client costs next to nothing: for figures of the server's own time.

Owns the connections. Looks at a response no further than its status and its length. `vecd bench` measures each latency,
at several times the cost. Called by `benchmarks.crowds`, `benchmarks.gateway_time` and `benchmarks.steady`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import uvloop

from benchmarks.requests import SUCCESS, response_length
from benchmarks.servers import ServerFailure
from vecd.base.target import Target

_TIMEOUT_S = 30.0
"""For the connections, and for the last responses after the end."""

Look = TypeVar("Look")


@dataclass(frozen=True, slots=True)
class Flooded(Generic[Look]):
    """What has been measured between two looks."""

    num_responses: int
    elapsed_s: float
    before: Look
    after: Look

    @property
    def per_s(self) -> float:
        return self.num_responses / self.elapsed_s


def flood(
    target: Target,
    requests: Iterator[bytes],
    num_clients: int,
    duration_s: float,
    look: Callable[[], Look],
    warmup_s: float = 0.5,
) -> Flooded[Look]:
    """Send `requests`, each by the next connection that is free. `look` is called at both ends of `duration_s`.

    Raises ServerFailure for any response that is no success, and when there are not enough requests.
    """
    return uvloop.run(_flood(target, requests, num_clients, duration_s, look, warmup_s))


def send_all(target: Target, requests: list[bytes], num_clients: int) -> None:
    """Send each of them once. Raises ServerFailure."""

    async def send() -> None:
        crowd = Crowd(iter(requests))
        async with crowd.connected(target, num_clients):
            await crowd.has_ended.wait()
        if crowd.num_responses < len(requests):
            raise ServerFailure(crowd.failure)

    uvloop.run(send())


async def _flood(
    target: Target,
    requests: Iterator[bytes],
    num_clients: int,
    duration_s: float,
    look: Callable[[], Look],
    warmup_s: float,
) -> Flooded[Look]:
    crowd = Crowd(requests)
    async with crowd.connected(target, num_clients):
        await crowd.sleep(warmup_s)
        started_s, num_before, before = time.perf_counter(), crowd.num_responses, look()
        await crowd.sleep(duration_s)
        elapsed_s, num_after, after = time.perf_counter() - started_s, crowd.num_responses, look()
        crowd.stop()
    return Flooded(num_after - num_before, elapsed_s, before, after)


class Crowd:
    """What the connections share."""

    def __init__(self, requests: Iterator[bytes], on_response: Callable[[bytes], None] | None = None) -> None:
        """`on_response` is called with each request whose response has come."""
        self._requests = requests
        self._on_response = on_response
        self.num_responses = 0
        self.num_waiting = 0
        self.failure = ""
        self.has_ended = asyncio.Event()
        """No connection waits for a response, and none will send."""
        self._has_stopped = False

    def connected(self, target: Target, num_clients: int) -> "_Connected":
        return _Connected(self, target, num_clients)

    def stop(self) -> None:
        """Send no more."""
        self._has_stopped = True

    async def sleep(self, seconds: float) -> None:
        """Raises ServerFailure when the requests end meanwhile, or one of them fails."""
        try:
            await asyncio.wait_for(self.has_ended.wait(), seconds)
        except TimeoutError:
            return
        raise ServerFailure(self.failure)

    def next(self) -> bytes | None:
        """The next request, of which the caller waits for the response; None at the end."""
        request = None if self._has_stopped else next(self._requests, None)
        if request is None:
            self.failure = self.failure or "there are not enough requests"
        else:
            self.num_waiting += 1
        if not self.num_waiting:
            self.has_ended.set()
        return request

    def count(self, request: bytes) -> None:
        """The response to `request` has come."""
        self.num_responses += 1
        self.num_waiting -= 1
        if self._on_response is not None:
            self._on_response(request)

    def fail(self, failure: str) -> None:
        if self.num_waiting:
            self.failure = failure
            self.stop()
            self.has_ended.set()


class _Connected:
    def __init__(self, crowd: Crowd, target: Target, num_clients: int) -> None:
        self._crowd, self._target, self._num_clients = crowd, target, num_clients
        self._connections: list[Connection] = []

    async def __aenter__(self) -> None:
        for _ in range(self._num_clients):
            self._connections.append(await connect(self._crowd, self._target))
        for connection in self._connections:
            connection.send_next()

    async def __aexit__(self, *_: object) -> None:
        self._crowd.stop()
        try:
            await asyncio.wait_for(self._crowd.has_ended.wait(), _TIMEOUT_S)
        except TimeoutError as error:
            raise ServerFailure(f"no response for {_TIMEOUT_S:g} s") from error
        finally:
            for connection in self._connections:
                connection.close()


class Connection(asyncio.Protocol):
    """One of a crowd. It sends nothing before `send_next`."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._sent = b""
        self._transport: asyncio.Transport
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of it

    def send_next(self) -> None:
        if (request := self._crowd.next()) is not None:
            self._sent = request
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if (length := response_length(self._received)) is None or len(self._received) < length:
            return
        if not self._received.startswith(SUCCESS):
            self._crowd.fail(f"the server answered {bytes(self._received[:200])!r}")
            return
        self._received.clear()
        self._crowd.count(self._sent)
        self.send_next()

    def close(self) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.fail(f"the server has closed a connection: {exc}")


async def connect(crowd: Crowd, target: Target) -> Connection:
    """A new connection of the crowd. Raises OSError, of which TimeoutError is one."""
    connecting = asyncio.get_running_loop().create_connection(lambda: Connection(crowd), target.host, target.port)
    _, connection = await asyncio.wait_for(connecting, _TIMEOUT_S)
    return connection
