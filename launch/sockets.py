"""The sockets that outlive every child: the one clients connect to, and those workers reach the gateways by."""

import os
import socket
import tempfile
from pathlib import Path

from launch.failure import StartFailure
from launch.settings import Settings

_LISTEN_BACKLOG = 2048
_PROBE_TIMEOUT_S = 1.0


def listen(settings: Settings) -> tuple[socket.socket, str]:
    """Bind and listen; returns the socket and the URL to reach it. Raises StartFailure."""
    try:
        if settings.uds is not None:
            return _listen_unix(settings.uds), f"unix:{settings.uds}"
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_LISTEN_BACKLOG)
    except OSError as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        raise StartFailure(f"cannot listen on {where}: {error.strerror or error}") from None
    host, port = sock.getsockname()[:2]
    return sock, f"http://[{host}]:{port}" if family == socket.AF_INET6 else f"http://{host}:{port}"


def _listen_unix(path: Path) -> socket.socket:
    """A socket file left by a killed server is replaced; one that somebody listens on is not."""
    sock = socket.socket(socket.AF_UNIX)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_TIMEOUT_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            except TimeoutError:
                pass  # somebody listens, and is busy: the bind below says that the path is in use
    sock.bind(str(path))
    sock.listen(_LISTEN_BACKLOG)
    return sock


def make_zmq_endpoint() -> tuple[socket.socket, int]:
    """A listening unix socket without a name, and an O_PATH descriptor by which workers reach it.

    The name exists for a moment, in a folder only we can enter; what has no name cannot be left behind, stolen or
    entered by another user. Gateways come and go on the same socket (ADR 0002).
    """
    with tempfile.TemporaryDirectory(prefix="vecd-") as folder:
        path = os.path.join(folder, "gateway")
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        sock.listen(_LISTEN_BACKLOG)
        return sock, os.open(path, os.O_PATH | os.O_CLOEXEC)
