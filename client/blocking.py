"""`vecd.Client`: a server from blocking code, on any number of threads; and `vecd.Server`, which starts one of its own.

Owns blocking sockets and the threads of a call that is cut into several requests. What is sent and repeated is
`vecd.client.calls`' and `.exchanges`'.
"""

import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

from vecd.base.target import Target
from vecd.client import calls
from vecd.client.connection import check_mismatch
from vecd.client.exchanges import (
    CONNECT_S,
    SILENCE_S,
    ClientBase,
    ClientCall,
    Pause,
    Piece,
    Send,
    ServerNotStarted,
    Steps,
    VecdError,
)
from vecd.client.local_server import LocalServer, NotStarted

P = ParamSpec("P")
T = TypeVar("T")
_NOT_STARTED = "unix:/not-started"


def _blocking(make: Callable[Concatenate[ClientBase, P], Steps[T]]) -> "Callable[Concatenate[Client, P], T]":
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(make(self, *args, **kwargs))

    return update_wrapper(method, make)


class Client(ClientBase):
    """A server that runs somewhere. Threads may share it. It is pickled as its arguments."""

    _idle: "list[_Connection]"

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
        """At first, and in a forked process, which must not use those of its parent."""
        _clients.add(self)
        self._idle = []

    def _why_gone(self) -> str | None:
        return None

    def _run(self, steps: Steps[T]) -> T:
        call = _BlockingCall(self, ClientCall(self, self._why_gone))
        try:
            while True:
                call.answer(next(steps))
        except StopIteration as done:
            result: T = done.value
            return result

    def take(self) -> "_Connection | None":
        with suppress(IndexError):  # another thread may take the last one
            return self._idle.pop()
        return None


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._forget_connections()


os.register_at_fork(after_in_child=_after_fork)


class _Ended(Exception):
    """Raised in the threads of a call that has failed in another one."""


class _BlockingCall:
    def __init__(self, client: Client, call: ClientCall) -> None:
        self._client, self._call = client, call
        self._is_ended = threading.Event()
        self._busy: set[_Connection] = set()

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
            if isinstance(step, Pause):
                self._is_ended.wait(step.seconds)
                continue
            try:
                self._send(step)
            except Exception as error:  # the policy's to judge: it raises what is not its own
                step.failure = error

    def _send(self, step: Send) -> None:
        until = time.monotonic() + step.timeout_s
        while (connection := self._client.take()) is not None:
            try:
                self._exchange(connection, step, until)
                return
            except ConnectionError:
                if step.reader.has_bytes:
                    raise
                # The server closed it while it was idle: the request was not read, or can be repeated like any other.
        self._exchange(_connect(self._client._target, min(step.timeout_s, CONNECT_S)), step, until)

    def _exchange(self, connection: "_Connection", step: Send, until: float) -> None:
        self._busy.add(connection)
        try:
            if self._is_ended.is_set():
                raise _Ended
            connection.exchange(step, until)
        except BaseException:
            connection.close()
            raise
        finally:
            self._busy.discard(connection)
        if step.reader.keeps_alive:
            self._client._idle.append(connection)
        else:
            connection.close()


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def exchange(self, send: Send, until: float) -> None:
        """Raises OSError, BadResponse."""
        reader = send.reader
        failure: OSError | None = None
        try:
            self._wait_until(until)
            self._socket.sendall(send.request)
        except TimeoutError:
            raise
        except OSError as error:  # it may have answered before it closed: the body is too large, say
            failure = error
        while not reader.is_complete:
            self._wait_until(until)
            try:
                num_bytes = self._socket.recv_into(reader.buffer())
            except OSError as error:
                raise failure or error from None
            if num_bytes:
                reader.received(num_bytes)
            elif failure is not None and not reader.has_bytes:
                raise failure
            else:
                reader.ended()

    def _wait_until(self, until: float) -> None:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no whole answer in time")
        self._socket.settimeout(min(left_s, SILENCE_S))

    def interrupt(self) -> None:
        """End what another thread does with it."""
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _connect(target: Target, timeout_s: float) -> _Connection:
    """Raises OSError, of which TlsMismatch is one."""
    if target.unix_path is None:
        sock = socket.create_connection((target.host, target.port), timeout_s)
    else:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if target.unix_path is not None:
            sock.settimeout(timeout_s)
            sock.connect(target.unix_path)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if target.tls is not None:
                sock = target.tls.wrap_socket(sock, server_hostname=target.host)
    except OSError as error:
        sock.close()
        if isinstance(error, ssl.SSLError):
            check_mismatch(error, "ca=")
        raise
    return _Connection(sock)


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
            if self._server is None:
                self._start()
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

    def _why_gone(self) -> str | None:
        if self._server is None:
            return "the server has not been started: use `with vecd.Server(...)`, or `start`"
        return self._server.why_gone()

    def _start(self) -> None:
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
