"""`vecd.AsyncClient`: a server from coroutines. Its methods are those of `vecd.Client`.

Owns connections of asyncio and the tasks of a call that is cut into several requests. What is sent and repeated is
`vecd.client.calls`' and `.exchanges`'.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from vecd.base.target import Target
from vecd.client import calls
from vecd.client.exchanges import OTHER_MODEL, ClientBase, ClientCall, Piece, Send, Steps
from vecd.client.http import ServerResponse
from vecd.client.sockets import AsyncConnection, connect, find_mismatch

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

    _idle: "dict[asyncio.AbstractEventLoop, list[AsyncConnection]]"
    _may_speak_tls = False
    """Whether a failure may be that of plain HTTP to a server of TLS: of a command, before the first response."""

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

    @classmethod
    def of_command(cls, target: Target, user_agent: str, **arguments: Any) -> Self:
        """A client of a command, whose flags say which certificates are trusted. `arguments`: those of `__init__`."""
        client = cls(str(target), **arguments)
        client.target, client.user_agent, client._may_speak_tls = target, user_agent, True
        return client

    async def answer(self, piece: Piece, call: ClientCall | None = None) -> Any:
        """Send `piece` until it has its answer, and return that. Raises VecdError."""
        for step in (call or ClientCall(self)).attempts(piece):
            if isinstance(step, Send):
                await self.send(step)
            else:
                await asyncio.sleep(step)
        return piece.answer

    async def send(self, step: Send) -> None:
        """Side effects: sets `outcome`."""
        try:
            step.outcome = await self._send(step)
        except Exception as error:  # the policy's to judge: it raises what is not its own
            step.outcome = error
        if self._may_speak_tls and not isinstance(step.outcome, ConnectionRefusedError):
            status = step.outcome.status if isinstance(step.outcome, ServerResponse) else None
            if status in (None, 400):
                step.outcome = await find_mismatch(self.target) or step.outcome
            self._may_speak_tls = status is None

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
                await self.answer(piece, call)

        if len(pieces) == 1:
            await answer_some()
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self.connections, len(pieces))):
                    tasks.create_task(answer_some())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _send(self, step: Send) -> ServerResponse:
        until = asyncio.get_running_loop().time() + step.timeout_s
        while idle := self._idle.get(asyncio.get_running_loop()):
            connection = idle.pop()
            try:
                return await self._exchange(connection, step, until)
            except ConnectionError:
                if connection.reader.has_bytes:
                    raise
                # The server closed it while it was idle.
        return await self._exchange(await connect(self.target, step.timeout_s), step, until)

    async def _exchange(self, connection: AsyncConnection, step: Send, until: float) -> ServerResponse:
        loop = asyncio.get_running_loop()
        response = await connection.exchange(step.request, until - loop.time(), step.place, self.silence_s)
        if response.status == OTHER_MODEL:  # another connection may lead to another node
            connection.close()
        elif connection.is_open:
            self._idle.setdefault(loop, []).append(connection)
        return response
