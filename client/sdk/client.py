"""`vecd.Client`: a server from blocking code, on any number of threads.

Owns blocking sockets and the threads of a call that is cut into several requests. What is sent and repeated is
`vecd.client.sdk.calls`' and `.exchanges`'. Called by users, and by `vecd.client.sdk.server`.
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
from functools import update_wrapper
from typing import Concatenate, ParamSpec, TypeVar

from vecd.client.connection import Target, TlsMismatch
from vecd.client.sdk import calls
from vecd.client.sdk.endpoint import ClientBase
from vecd.client.sdk.errors import VecdError
from vecd.client.sdk.exchanges import CONNECT_S, SILENCE_S, ClientCall, Pause, Piece, Send, Steps

P = ParamSpec("P")
T = TypeVar("T")


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
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _forget_connections(self) -> None:
        """At first, and in a forked process, which must not use those of its parent."""
        _clients.add(self)
        self._lock = threading.Lock()
        self._idle = []

    def _why_gone(self) -> str | None:
        return None

    def _run(self, steps: Steps[T]) -> T:
        call = _BlockingCall(self, ClientCall(self, self._why_gone))
        try:
            pieces = next(steps)
            while True:
                try:
                    call.answer(pieces)
                except VecdError as error:
                    pieces = steps.throw(error)
                else:
                    pieces = next(steps)
        except StopIteration as done:
            result: T = done.value
            return result

    def take(self) -> "_Connection | None":
        """An idle connection."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def put_back(self, connection: "_Connection") -> None:
        with self._lock:
            self._idle.append(connection)


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._forget_connections()


os.register_at_fork(after_in_child=_after_fork)


class _Ended(Exception):
    """Raised in the threads of a call that has failed in another one."""


class _BlockingCall:
    """The threads and sockets of one call."""

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
        attempts = self._call.attempts(piece)
        try:
            step = next(attempts)
            while True:
                try:
                    self._do(step)
                except Exception as error:  # the policy's to judge: it raises what is not its own
                    step = attempts.throw(error)
                else:
                    step = next(attempts)
        except StopIteration:
            return

    def _do(self, step: Send | Pause) -> None:
        if self._is_ended.is_set():
            raise _Ended
        if isinstance(step, Pause):
            self._is_ended.wait(step.seconds)
            return
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
            self._client.put_back(connection)
        else:
            connection.close()


class _Connection:
    """A connected socket."""

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
    if target.unix_path is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(target.unix_path)
        except OSError:
            sock.close()
            raise
        return _Connection(sock)
    sock = socket.create_connection((target.host, target.port), timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if target.tls is None:
        return _Connection(sock)
    try:
        return _Connection(target.tls.wrap_socket(sock, server_hostname=target.host))
    except ssl.SSLCertVerificationError as error:
        sock.close()
        raise TlsMismatch(f"its certificate is not trusted: {error.verify_message or error.reason} (ca=)") from error
    except ssl.SSLError as error:
        sock.close()
        if error.reason == "WRONG_VERSION_NUMBER":
            raise TlsMismatch("it does not speak TLS: use http://") from error
        raise
    except OSError:
        sock.close()
        raise
