"""`vecd.AsyncClient`: a server from coroutines. Its methods are those of `vecd.Client`.

Owns connections of asyncio and the tasks of a call that is cut into several requests. What is sent and repeated is
`vecd.client.calls`' and `.exchanges`'.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from vecd.client import calls
from vecd.client.connection import BadResponse, ConnectionClosed, connect_protocol
from vecd.client.exchanges import CONNECT_S, SILENCE_S, ClientBase, ClientCall, Pause, Piece, Send, Steps
from vecd.client.http1 import ResponseReader

P = ParamSpec("P")
T = TypeVar("T")


def _coroutine(
    make: Callable[Concatenate[ClientBase, P], Steps[T]],
) -> "Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]":
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(make(self, *args, **kwargs))

    return update_wrapper(method, make)


class AsyncClient(ClientBase):
    """A server that runs somewhere. Any number of tasks may share it, in several event loops and threads, too: each
    loop has connections of its own. It is pickled as its arguments."""

    _idle: "dict[asyncio.AbstractEventLoop, list[_Connection]]"

    embed = _coroutine(calls.embed)
    encode = _coroutine(calls.encode)
    encode_query = _coroutine(calls.encode_query)
    encode_document = _coroutine(calls.encode_document)
    sparse = _coroutine(calls.sparse)
    multi_vector = _coroutine(calls.multi_vector)
    rerank = _coroutine(calls.rerank)
    score = _coroutine(calls.score)
    classify = _coroutine(calls.classify)
    entities = _coroutine(calls.entities)
    tokenize = _coroutine(calls.tokenize)
    info = _coroutine(calls.info)
    similarity = staticmethod(calls.similarity)

    async def close(self) -> None:
        """Close the idle connections of this event loop. The client can be used again."""
        self._forget_ended()
        for connection in self._idle.pop(asyncio.get_running_loop(), []):
            connection.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _forget_connections(self) -> None:
        self._idle = {}

    def _forget_ended(self) -> None:
        """The connections of a loop have ended with it, and their transports can do nothing any more."""
        for loop in list(self._idle):
            if loop.is_closed():
                self._idle.pop(loop, None)

    async def _run(self, steps: Steps[T]) -> T:
        self._forget_ended()
        call = ClientCall(self)
        try:
            while True:
                await self._answer_all(call, next(steps))
        except StopIteration as done:
            result: T = done.value
        return result

    async def _answer_all(self, call: ClientCall, pieces: Sequence[Piece]) -> None:
        rest = iter(pieces)

        async def answer_some() -> None:
            for piece in rest:
                await self._answer(call, piece)

        if len(pieces) == 1:
            await answer_some()
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self.connections, len(pieces))):
                    tasks.create_task(answer_some())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _answer(self, call: ClientCall, piece: Piece) -> None:
        for step in call.attempts(piece):
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                continue
            try:
                await self._send(step)
            except Exception as error:  # the policy's to judge: it raises what is not its own
                step.failure = error

    async def _send(self, step: Send) -> None:
        async with asyncio.timeout(None if math.isinf(step.timeout_s) else step.timeout_s):
            while idle := self._idle.get(asyncio.get_running_loop()):
                try:
                    await self._exchange(idle.pop(), step)
                    return
                except ConnectionError:
                    if step.reader.has_bytes:
                        raise
                    # The server closed it while it was idle.
            connection = await connect_protocol(_Connection, self._target, min(step.timeout_s, CONNECT_S), "ca=")
            await self._exchange(connection, step)

    async def _exchange(self, connection: "_Connection", step: Send) -> None:
        try:
            await connection.exchange(step.request, step.reader)
        except BaseException:
            connection.close()
            raise
        if step.reader.keeps_alive:
            self._idle.setdefault(asyncio.get_running_loop(), []).append(connection)
        else:
            connection.close()


class _Connection(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._reader: ResponseReader | None = None
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._silence: asyncio.Timeout
        self._lost: Exception | None = None
        self._unused = memoryview(bytearray(1))

    async def exchange(self, request: bytes, reader: ResponseReader) -> None:
        """Raises OSError, BadResponse."""
        if self._lost is not None:
            raise self._lost
        self._answered = self._loop.create_future()
        self._reader = reader
        self._transport.write(request)
        try:
            async with asyncio.timeout(SILENCE_S) as self._silence:
                await self._answered
        finally:
            self._reader = None  # the memory is the caller's again

    def close(self) -> None:
        self._transport.abort()

    def _settle(self, error: Exception | None) -> None:
        if self._answered.done():
            return
        if error is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(error)

    # --- called by the event loop -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._unused if self._reader is None else self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._reader is None or self._answered.done():
            self._lost = ConnectionClosed("bytes without a request")
            self._transport.abort()
            return
        self._silence.reschedule(self._loop.time() + SILENCE_S)
        try:
            if self._reader.received(nbytes):
                self._settle(None)
        except BadResponse as error:
            self._settle(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = exc if isinstance(exc, OSError) else ConnectionClosed("closed by the server")
        if self._reader is None or self._answered.done():
            return
        try:
            self._reader.ended()
            self._settle(None)
        except ConnectionClosed as error:
            self._settle(exc or error)
