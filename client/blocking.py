"""`vecd.Client`: a server from blocking code, on any number of threads; and `vecd.Server`, which starts one of its own.

Owns blocking sockets and the threads of a call that is cut into several requests. What is sent and repeated is
`vecd.client.calls`' and `.exchanges`'.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

from vecd.client import calls
from vecd.client.exchanges import ClientBase, ClientCall, Piece, Send, ServerNotStarted, Steps, VecdError
from vecd.client.http import ServerResponse
from vecd.client.local_server import LocalServer, NotStarted
from vecd.client.sockets import BlockingConnection

P = ParamSpec("P")
T = TypeVar("T")
_NOT_STARTED = "unix:/not-started"


def _blocking(make: Callable[Concatenate[ClientBase, P], Steps[T]]) -> "Callable[Concatenate[Client, P], T]":
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(make(self, *args, **kwargs))

    return update_wrapper(method, make)


class Client(ClientBase):
    """A server that runs somewhere. Threads may share it. It is pickled as its arguments."""

    _idle: "list[BlockingConnection]"

    embed = _blocking(calls.embed)
    encode = _blocking(calls.encode)
    encode_query = _blocking(calls.encode_query)
    encode_document = _blocking(calls.encode_document)
    sparse = _blocking(calls.sparse)
    multi_vector = _blocking(calls.multi_vector)
    rerank = _blocking(calls.rerank)
    score = _blocking(calls.score)
    classify = _blocking(calls.classify)
    entities = _blocking(calls.entities)
    tokenize = _blocking(calls.tokenize)
    info = _blocking(calls.info)
    similarity = staticmethod(calls.similarity)

    def close(self) -> None:
        """Close the idle connections. The client can be used again."""
        while (connection := self.take()) is not None:
            connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _forget_connections(self) -> None:
        self._pid = os.getpid()
        self._idle = []

    def _run(self, steps: Steps[T]) -> T:
        call = _BlockingCall(self)
        try:
            while True:
                call.answer(next(steps))
        except StopIteration as done:
            result: T = done.value
            return result

    def take(self) -> "BlockingConnection | None":
        if self._pid != os.getpid():  # a forked process must not use those of its parent
            self._forget_connections()
        with suppress(IndexError):  # another thread may take the last one
            return self._idle.pop()
        return None


class _Ended(Exception):
    """Raised in the threads of a call that has failed in another one."""


class _BlockingCall:
    def __init__(self, client: Client) -> None:
        self._client, self._call = client, ClientCall(client)
        self._is_ended = threading.Event()
        self._busy: set[BlockingConnection] = set()

    def answer(self, pieces: Sequence[Piece]) -> None:
        """Returns when all have their answers; raises the first error."""
        num_threads = min(self._client.connections, len(pieces))
        if num_threads <= 1:
            for piece in pieces:
                self._answer(piece)
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="vecd-client") as threads:
            try:
                for done in wait([threads.submit(self._answer, piece) for piece in pieces], None, FIRST_EXCEPTION).done:
                    done.result()
            except BaseException:  # Ctrl-C, too: the threads must end first
                self._end()
                threads.shutdown(cancel_futures=True)
                raise

    def _end(self) -> None:
        self._is_ended.set()
        for connection in list(self._busy):
            connection.interrupt()

    def _answer(self, piece: Piece) -> None:
        for step in self._call.attempts(piece):
            if self._is_ended.is_set():
                raise _Ended
            if not isinstance(step, Send):
                self._is_ended.wait(step)
                continue
            try:
                step.outcome = self._send(step)
            except Exception as error:  # the policy's to judge: it raises what is not its own
                step.outcome = error

    def _send(self, step: Send) -> ServerResponse:
        until = time.monotonic() + step.timeout_s
        while (connection := self._client.take()) is not None:
            try:
                return self._exchange(connection, step, until)
            except ConnectionError:
                if connection.reader.has_bytes:
                    raise
                # The server closed it while it was idle: the request was not read, or can be repeated like any other.
        return self._exchange(BlockingConnection(self._client.target, step.timeout_s), step, until)

    def _exchange(self, connection: BlockingConnection, step: Send, until: float) -> ServerResponse:
        self._busy.add(connection)
        try:
            if self._is_ended.is_set():
                raise _Ended
            response = connection.exchange(step.request, until, step.place, self._client.silence_s)
        except BaseException:
            connection.close()
            raise
        finally:
            self._busy.discard(connection)
        if connection.reader.keeps_alive:
            self._client._idle.append(connection)
        else:
            connection.close()
        return response


class Server(Client):
    """A server of its own, on a unix socket in a folder that only this user can read; a `Client` of it.

    It ends with the block, with `close`, and with this process, however that dies. In a forked process, and unpickled
    in another one of this machine, it is a client of the same server, and does not end it.
    """

    def __init__(
        self,
        *models: str | os.PathLike[str],
        timeout: float | None = None,
        retry_for: float = 60.0,
        connections: int = 4,
        start_timeout: float = 600.0,
        **flags: Any,
    ) -> None:
        """Nothing is started before `start`, or the block.

        `models`: as `vecd serve` takes them; none for the bundled one. `start_timeout`: seconds until the server must
        be ready. `flags`: those of `vecd serve` (docs/operating.md), with _ for -: `dtype="float32", workers=2`. True
        is a flag without a value, False one with `no-` in front, None none, and a list has its items joined by commas.
        The other arguments are those of `vecd.Client`.
        """
        key = flags.pop("api_key", None)
        super().__init__(_NOT_STARTED, api_key=key, timeout=timeout, retry_for=retry_for, connections=connections)
        self._environment = {} if key is None else {"VECD_API_KEY": key}  # a flag shows in ps
        self._serve_arguments = [*(os.fspath(model) for model in models), *_written(flags), "--drain-grace", "0"]
        self._start_timeout_s = start_timeout
        self._starting = threading.Lock()
        self._server: LocalServer | None = None
        self._finalizer: weakref.finalize[..., Server]

    @property
    def pid(self) -> int | None:
        """Of the process between this one and the server; None unless it runs."""
        return self._server.pid if self._server is not None else None

    def start(self) -> "Server":
        """Returns when the server is ready; at once if it runs. Raises ServerNotStarted with the end of its log."""
        with self._starting:
            if self._server is not None:
                return self
            server = LocalServer(self._serve_arguments, sockets={"--uds": "sock"}, environment=self._environment)
            try:
                server.await_ready(self._start_timeout_s)
            except NotStarted as error:
                raise ServerNotStarted(str(error)) from None
            self._point_to(f"unix:{server.path('sock')}")
            self.limits = self.identity = None
            self._server = server
            # Also when this object is no longer used, and when the interpreter ends in good order.
            self._finalizer = weakref.finalize(self, server.stop)
            return self

    def close(self) -> None:
        """Stop the server. It can be started again."""
        super().close()
        server, self._server = self._server, None
        if server is not None:
            self._finalizer()
            self._point_to(_NOT_STARTED)

    def __enter__(self) -> "Server":
        return self.start()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._server is None:
            raise VecdError("a server that does not run cannot be pickled: start it first")
        return partial(Client, **self._arguments), ()

    def why_gone(self) -> str | None:
        if self._server is None:
            return "the server has not been started: use `with vecd.Server(...)`, or `start`"
        return self._server.why_gone()


def _written(flags: dict[str, Any]) -> list[str]:
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words.append(f"--{flag}={text}")  # one word: a value may begin with -
    return words
