"""The sockets that outlive every child: for clients, for operators, and for the workers' connections to gateways.

Owns how they are made, with which permissions, without replacing another server's; and which of them systemd has made
and handed over (`take_inherited`). Never accepts a connection.
"""

import os
import re
import socket
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from vecd.base.failures import ConfigurationError, StartFailure
from vecd.shm.control import FileId, file_id, remove_if_ours
from vecd.shm.settings import Settings

_LISTEN_BACKLOG = 2048
_PROBE_TIMEOUT_S = 1.0
_ONLY_OURS = 0o600

FIRST_INHERITED = 3
# Source: sd_listen_fds(3), SD_LISTEN_FDS_START.
_MAX_INHERITED = 64
ADMIN_NAME = "admin"
"""FileDescriptorName= of the socket for operators. The public one may have any other."""
_REPLACED = {"public": ("host", "port", "uds"), "admin": ("admin_host", "admin_port", "admin_uds")}


@dataclass(frozen=True, slots=True)
class Inherited:
    """Listening sockets that another process keeps open: connections in their backlog are for the next server. None:
    this process makes its own."""

    public: socket.socket | None = None
    admin: socket.socket | None = None


def take_inherited(settings: Settings, environ: MutableMapping[str, str] = os.environ) -> Inherited:
    """The sockets that systemd has handed over by a socket unit. Raises ConfigurationError for one that cannot be
    served, and for settings of another address.

    Side effects: removes the variables; the descriptors are closed in children.
    """
    number, pid, names = (environ.pop(f"LISTEN_{name}", "") for name in ("FDS", "PID", "FDNAMES"))
    if not number or pid != str(os.getpid()):
        return Inherited()
    if not (re.fullmatch("[0-9]{1,9}", number) and int(number) <= _MAX_INHERITED):
        raise ConfigurationError(f"LISTEN_FDS: must be a number up to {_MAX_INHERITED} (given: {number!r})")
    # Without names, as from systemd-socket-activate, the first is the public one.
    found = dict.fromkeys(_REPLACED, None) | _by_use(range(FIRST_INHERITED, FIRST_INHERITED + int(number)), names)
    problems = [
        f"{name.replace('_', '-')}: given, but the {use} socket is systemd's: remove the setting, or say so in the "
        f"socket unit (ListenStream=)"
        for use, replaced in _REPLACED.items()
        if found[use] is not None
        for name in replaced
        if name in settings.given.names
    ]
    if problems:
        raise ConfigurationError(*problems)
    return Inherited(**found)


def _by_use(fds: range, names: str) -> dict[str, socket.socket]:
    found: dict[str, socket.socket] = {}
    for fd, name in zip(fds, names.split(":") + [""] * len(fds), strict=False):
        use = "admin" if name == ADMIN_NAME else "public"
        if use in found:
            raise ConfigurationError(
                f"sockets handed over: {len(fds)}, of which at most one may be named {ADMIN_NAME}, and one otherwise "
                 f"(FileDescriptorName=; given: {names!r})"
            )  # fmt: skip
        found[use] = _checked(fd, name)
    return found


def _checked(fd: int, name: str) -> socket.socket:
    which = f"descriptor {fd} ({name})" if name else f"descriptor {fd}"
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
        is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigurationError(f"{which}: was to be a socket: {error.strerror}") from None
    if sock.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) or sock.type != socket.SOCK_STREAM:
        problem = "is no stream socket (ListenStream=)"
    elif not is_listening:
        problem = "does not listen: with Accept=yes there is a service for each connection, and vecd is one for all"
    else:
        return sock
    sock.detach()
    raise ConfigurationError(f"{which}: {problem}")


class Listeners:
    """The sockets for clients and operators. Owns them, and the files of those that this process has made."""

    def __init__(self, settings: Settings, inherited: Inherited) -> None:
        """Bind and listen, where no socket was handed over. Raises StartFailure."""
        self._files: list[tuple[Path, FileId | None]] = []
        self.sockets: list[socket.socket] = []
        self.inherited = inherited
        self.admin_url = ""
        scheme = "https" if settings.tls_cert is not None else "http"
        try:
            self.url = self._open(inherited.public, settings.uds, settings.host, settings.port, scheme)
            if inherited.admin or settings.admin_uds or settings.admin_port is not None:
                port = settings.admin_port or 0
                self.admin_url = self._open(inherited.admin, settings.admin_uds, settings.admin_host, port, "http")
        except StartFailure:
            self.close()
            raise

    def _open(self, inherited: socket.socket | None, path: Path | None, host: str, port: int, scheme: str) -> str:
        """Returns the URL. A unix socket has mode 0600: only programs of the same user may connect."""
        try:
            sock = inherited or (_listen_unix(path) if path is not None else _listen(host, port))
        except OSError as error:
            raise StartFailure(f"cannot listen on {path or f'{host}:{port}'}: {error.strerror or error}") from None
        self.sockets.append(sock)
        if path is not None:
            self._files.append((path, file_id(path)))
        return _url(sock, scheme)

    def close_sockets(self) -> None:
        """Gateways may have them open."""
        for sock in self.sockets:
            sock.close()

    def close(self) -> None:
        self.close_sockets()
        for path, ours in self._files:
            remove_if_ours(path, ours)


def _listen(host: str, port: int) -> socket.socket:
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
    return sock


def _listen_unix(path: Path) -> socket.socket:
    """Replaces the socket file of a killed server, and none on which a process listens."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        _remove_if_dead(path)
        sock.bind(str(path))
        path.chmod(_ONLY_OURS)  # whatever the umask; no client can connect before it listens
        sock.listen(_LISTEN_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _url(sock: socket.socket, scheme: str) -> str:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}" if isinstance(name, str) else f"unix:@{name[1:].decode(errors='replace')}"
    host, port = name[:2]
    return f"{scheme}://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"


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
            pass  # another process listens, and is busy: bind() will fail


def make_zmq_endpoint() -> tuple[socket.socket, int]:
    """A listening unix socket without a name, and an O_PATH descriptor by which workers reach it. No other user can
    connect. All processes of one gateway use the same socket (ADR 0002)."""
    with tempfile.TemporaryDirectory(prefix="vecd-") as folder:
        path = os.path.join(folder, "gateway")
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        sock.listen(_LISTEN_BACKLOG)
        return sock, os.open(path, os.O_PATH | os.O_CLOEXEC)
