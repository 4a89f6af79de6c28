"""Children that are started while the supervisor itself is still being imported, on another core.

Owns the children that are not taken yet. Imports nothing large.
"""

import resource
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from vecd.base.failures import without_interrupts
from vecd.base.programs import child_environment, start_child

if TYPE_CHECKING:
    from vecd.shm.control import Message

_UMASK = 0o077
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)

_waiting: dict[str, tuple["subprocess.Popen[bytes]", socket.socket]] = {}
"""By kind: a child, and our end of its control connection."""


def begin(*kinds: str) -> None:
    """Start a child of each kind. One that cannot be started is left to its first regular start, which reports it."""
    for kind in kinds:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, without_interrupts(), suppress(OSError):  # `end_rest` at an interrupt must know of it
            _waiting[kind] = start_child(kind, fd=theirs.fileno(), env=child_environment(), umask=_UMASK), ours


def is_waiting(kind: str) -> bool:
    return kind in _waiting


def tell(kind: str, message: "Message", fds: Sequence[int] = ()) -> None:
    from vecd.shm.control import Channel

    with suppress(KeyError, OSError):
        Channel(_waiting[kind][1]).send(message, fds, waits=False)


def take(kind: str) -> tuple["subprocess.Popen[bytes]", socket.socket] | None:
    """A child of this kind, with the limits that this process has now; None if none runs. The caller owns both."""
    if (found := _waiting.pop(kind, None)) is None:
        return None
    process, ours = found
    with suppress(OSError):  # a sandbox forbids it
        for limit in _LIMITS:
            resource.prlimit(process.pid, limit, resource.getrlimit(limit))
        if process.poll() is None:
            return found
    _end(process, ours)
    return None


def end_rest() -> None:
    while _waiting:
        _end(*_waiting.popitem()[1])


def _end(process: "subprocess.Popen[bytes]", ours: socket.socket) -> None:
    ours.close()
    process.kill()
    process.wait()
