"""The result of a reload, told on a socket; and `vecd reload`, which requests a reload and waits for its result.

Owns an abstract unix socket of the supervisor, named after its user and process id, because a signal has no reply:
`systemctl reload` would succeed before the reload has begun. /proc/net/unix lists such sockets, and they are gone with
their process. Only the server's own user and root are answered.
"""

import asyncio
import errno
import json
import logging
import os
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from vecd.base.failures import EXIT_BAD_CONFIGURATION, EXIT_COULD_NOT_START, EXIT_OK
from vecd.base.flags import flag_hints

log = logging.getLogger("vecd.supervisor")

_LISTED = Path("/proc/net/unix")
_REQUEST = b"reload\n"
_GREETING_TIMEOUT_S = 10.0
_MAX_WAIT_S = 3600.0
_CREDENTIALS = struct.Struct("3i")
"""Of SO_PEERCRED: process, user, group. Source: unix(7)."""

_USAGE = """\
usage: vecd reload [PID | --port PORT]

Have a server of this user read its configuration again, as SIGHUP does, and wait for the result: the server with this
process id, or the one on this port. Neither is needed if only one is running. Exits 0 when the server has its new
configuration, 2 with the reasons when that cannot be used and nothing has changed, and 3 when there is no such
server."""


class ReloadSocket:
    def __init__(
        self, request_reload: "Callable[[], asyncio.Future[list[str]] | None]", url: Callable[[], str]
    ) -> None:
        """`request_reload` returns why the reload was refused, [] if it was not; None if the server is ending. `url`:
        where the server listens; "" before it does."""
        self._request_reload = request_reload
        self._url = url
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Without a network namespace's abstract sockets, or under a name that is taken, there is no `vecd reload`.
        That is logged: any user of the machine can take a name."""
        address = address_of(os.geteuid(), os.getpid())
        try:
            self._server = await asyncio.start_unix_server(self._talk, address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                log.error("no `vecd reload` of this server: %s has the socket @%s", _owner_of(address), address[1:])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # ValueError: a line without end. CancelledError: the server ends, of which asyncio would log a traceback.
            with suppress(OSError, TimeoutError, ValueError, asyncio.CancelledError):
                _, user = peer_of(writer.get_extra_info("socket"))
                if user not in (0, os.geteuid()):
                    return
                writer.write(_line({"pid": os.getpid(), "url": self._url()}))
                async with asyncio.timeout(_GREETING_TIMEOUT_S):
                    if await reader.readline() != _REQUEST:
                        return
                if (result := self._request_reload()) is not None:
                    writer.write(_line({"problems": await result}))
                    await writer.drain()
        finally:
            writer.close()


class RunningServer(NamedTuple):
    pid: int
    url: str
    connection: socket.socket

    @property
    def port(self) -> int | None:
        return urlsplit(self.url).port


def main(arguments: Sequence[str]) -> int:
    """The command `vecd reload`. Returns the exit code."""
    pid = port = None
    match list(arguments):
        case []:
            pass
        case ["--help" | "-h"]:
            print(_USAGE)
            return EXIT_OK
        case ["--port", number] if re.fullmatch("[1-9][0-9]{0,4}", number):
            port = int(number)
        case [number] if re.fullmatch("[1-9][0-9]{0,6}", number):
            pid = int(number)
        case _:
            hints = flag_hints(arguments, ["--port", "--help"]).replace("; ", "\nvecd reload: ")
            return _fail(_USAGE + hints, EXIT_BAD_CONFIGURATION)
    servers = list(find_servers())
    try:
        return _reload_one(servers, pid, port)
    finally:
        for server in servers:
            server.connection.close()


def _reload_one(servers: Sequence[RunningServer], pid: int | None, port: int | None) -> int:
    found = [server for server in servers if pid in (None, server.pid) and port in (None, server.port)]
    if len(found) == 1:
        return _reload(found[0])
    lines = [f"  vecd reload {server.pid}    {server.url or 'starting'}" for server in servers]
    if found:
        what = "several servers of this user are running, name one:"
        return _fail("\n".join(["vecd reload: " + what, *lines]), EXIT_BAD_CONFIGURATION)
    wanted = f" with the process id {pid}" if pid else f" on port {port}" if port else ""
    others = ["; these are running:", *lines] if servers else [""]
    return _fail(f"vecd reload: no server of this user is running{wanted}" + "\n".join(others), EXIT_COULD_NOT_START)


def _reload(server: RunningServer) -> int:
    try:
        server.connection.settimeout(_MAX_WAIT_S)
        server.connection.sendall(_REQUEST)
        problems = _read(server.connection)["problems"]
    except TimeoutError:
        return _fail(f"vecd reload: not done within {_MAX_WAIT_S:.0f} s", EXIT_COULD_NOT_START)
    except (OSError, ValueError, LookupError, TypeError):
        return _fail("vecd reload: the server has ended meanwhile", EXIT_COULD_NOT_START)
    return _fail("\n".join(problems), EXIT_BAD_CONFIGURATION) if problems else EXIT_OK


def find_servers() -> Iterator[RunningServer]:
    """Those of this user, or of all users for root, in the order of their process ids."""
    try:
        listed = _LISTED.read_text(errors="replace")
    except OSError:
        return
    names = {(int(pid), int(user)) for user, pid in re.findall(r" @vecd-reload-(\d+)-(\d+)$", listed, re.MULTILINE)}
    for pid, user in sorted(names):
        if os.geteuid() not in (0, user):
            continue
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_GREETING_TIMEOUT_S)
        try:
            connection.connect(address_of(user, pid))
            if peer_of(connection) != (pid, user):  # another process has taken the name
                raise ValueError(pid)
            greeting = _read(connection)
            yield RunningServer(int(greeting["pid"]), str(greeting["url"]), connection)
        except (OSError, ValueError, LookupError, TypeError):
            connection.close()


def address_of(user: int, pid: int) -> str:
    return f"\0vecd-reload-{user}-{pid}"


def _owner_of(address: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.setblocking(False)
        connection.connect(address)
        return "process {} of user {}".format(*peer_of(connection))
    return "another process"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(packed)
    return pid, user


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read(connection: socket.socket) -> Any:
    """The next line. Raises OSError; ValueError at the end of the connection."""
    received = bytearray()
    while not received.endswith(b"\n"):
        if not (data := connection.recv(65536)):
            raise ValueError("closed")
        received += data
    return json.loads(received)


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
