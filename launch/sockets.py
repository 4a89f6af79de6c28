"""The sockets that outlive every child: for clients, for operators, and for workers to reach the gateways by.

Owns how they are made: whom they let in, and that no other server's is taken. Never accepts. Called by `supervisor`.
"""

import os
import socket
import tempfile
from pathlib import Path

from launch.failure import StartFailure
from launch.settings import Settings

_LISTEN_BACKLOG = 2048
_PROBE_TIMEOUT_S = 1.0
_ONLY_OURS = 0o600


def listen(settings: Settings) -> tuple[socket.socket, str]:
    """Bind and listen for clients; returns the socket and the URL to reach it. Raises StartFailure.

    A unix socket has mode 0600: only programs of the same user may connect, as a proxy in front would.
    """
    if settings.uds is not None:
        return _listen_unix(settings.uds)
    return _listen_tcp(settings.host, settings.port, "https" if settings.tls_cert is not None else "http")


def listen_admin(settings: Settings) -> tuple[socket.socket, str] | None:
    """The same for operators, without TLS; None if no setting asks for it. Raises StartFailure."""
    if settings.admin_uds is not None:
        return _listen_unix(settings.admin_uds)
    if settings.admin_port is not None:
        return _listen_tcp(settings.admin_host, settings.admin_port, "http")
    return None


def _listen_tcp(host: str, port: int, scheme: str) -> tuple[socket.socket, str]:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_LISTEN_BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise StartFailure(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    host, port = sock.getsockname()[:2]
    return sock, f"{scheme}://[{host}]:{port}" if family == socket.AF_INET6 else f"{scheme}://{host}:{port}"


def _listen_unix(path: Path) -> tuple[socket.socket, str]:
    """A socket file left by a killed server is replaced; one that somebody listens on is not."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        _remove_if_dead(path)
        sock.bind(str(path))
        path.chmod(_ONLY_OURS)  # whatever the umask; nobody can connect before it listens
        sock.listen(_LISTEN_BACKLOG)
    except OSError as error:
        sock.close()
        raise StartFailure(f"cannot listen on {path}: {error.strerror or error}") from None
    return sock, f"unix:{path}"


def _remove_if_dead(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except TimeoutError:
            pass  # somebody listens, and is busy: binding will say that the path is in use


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
