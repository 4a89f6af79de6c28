"""Close a listening socket without resetting connections that clients already have.

Closing a listening socket resets every connection that the kernel has made and no process has accepted yet: a client
would get no response to a request that it has already sent. So new connections are refused first, then those that wait
are accepted, then the socket is closed. Called by `vecd.gateway.http.server` when it drains.
"""

import ctypes
import socket
from contextlib import suppress

from vecd.shm.socketfile import FileId, remove_if_ours

# Linux UAPI include/uapi/asm-generic/socket.h, linux/filter.h: BPF_RET | BPF_K, "accept 0 bytes of the packet".
_SO_ATTACH_FILTER = 26
_DROP_PACKET = b"\x06\x00" + bytes(6)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def refuse_connects(sock: socket.socket, uds_id: FileId | None) -> None:
    """Refuse new connections to the listening `sock`; those that it already has can still be accepted.

    On TCP a socket filter drops the packets that open one; such a client tries again a second later, and is refused
    then. On a unix socket the file is removed, if it is still the one that `uds_id` names. Best effort: where
    the kernel forbids the filter, a connect in the moment of closing may be reset.
    """
    with suppress(OSError):
        if sock.family == socket.AF_UNIX:
            remove_if_ours(sock.getsockname(), uds_id)
            return
        program = _Program(1, _DROP_PACKET)
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
