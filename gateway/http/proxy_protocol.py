"""The header of the PROXY protocol, with which a proxy begins a connection to say whose it is.

Owns how versions 1 and 2 are read from bytes, and what is refused. Pure: no socket, no clock.
`vecd.gateway.http.proxy_layer` feeds it and closes what it refuses. Source:
https://www.haproxy.org/download/2.8/doc/proxy-protocol.txt, sections 2.1 and 2.2.

    version 1:  PROXY TCP4 192.0.2.7 10.0.0.2 50124 8000 CR LF                         at most 107 bytes
    version 2:  12 bytes signature │ version, command │ family │ length (2) │ addresses │ extensions, which are skipped
"""

import re
import socket
from typing import Final, NamedTuple

_MAX_V1_BYTES: Final = 107
"""With CR LF."""
_V1: Final = b"PROXY "
_V1_LINE = re.compile(r"PROXY (TCP4|TCP6) ([0-9a-fA-F:.]+) ([0-9a-fA-F:.]+) (0|[1-9][0-9]{0,4}) (0|[1-9][0-9]{0,4})")
_V1_UNKNOWN = re.compile(rb"PROXY UNKNOWN(?: [^\r\n]*)?")
_V2: Final = b"\r\n\r\n\0\r\nQUIT\n"
_V2_FIXED_BYTES: Final = 16
MAX_V2_BYTES: Final = 4096
"""Of the addresses and extensions of version 2, whose length field allows 65,535. Proxies send some 100."""
_LOCAL, _PROXIED = 0x20, 0x21
"""Version 2 and the command."""
_UNSPECIFIED = 0x00
_TCP4, _TCP6, _UNIX_STREAM = 0x11, 0x21, 0x31
_ADDRESS_BYTES: Final = {_TCP4: 12, _TCP6: 36, _UNIX_STREAM: 216}
_FAMILIES = {"TCP4": socket.AF_INET, "TCP6": socket.AF_INET6}


class ProxyHeaderError(Exception):
    """Raised by `read_header` for bytes that are no header. The message quotes none of them."""


class ProxyHeader(NamedTuple):
    num_bytes: int
    """Of the header; what the client sent is behind it."""
    is_local: bool
    """The proxy speaks for itself, as in a health check."""
    peername: tuple[str, int] | str | None
    """Of the proxy's client, as a socket has it: address and port, or "" on a unix socket; None if the proxy does not
    say it, or speaks for itself."""


def read_header(data: bytes) -> ProxyHeader | None:
    """The header that `data` begins with; None if bytes are missing. Raises ProxyHeaderError as soon as it is clear
    that there is none."""
    if data.startswith(_V2):
        return _read_v2(data)
    if data.startswith(_V1):
        return _read_v1(data)
    if _V2.startswith(data) or _V1.startswith(data):
        return None
    raise ProxyHeaderError("it begins with something else")


def _read_v1(data: bytes) -> ProxyHeader | None:
    end = data.find(b"\n", 0, _MAX_V1_BYTES)
    if end < 0:
        if len(data) >= _MAX_V1_BYTES:
            raise ProxyHeaderError(f"version 1: its line is longer than {_MAX_V1_BYTES} bytes")
        return None
    line, line_end = data[: end - 1], data[end - 1 : end + 1]
    if line_end != b"\r\n" or b"\r" in line:
        raise ProxyHeaderError("version 1: its line does not end with CR LF")
    if _V1_UNKNOWN.fullmatch(line):
        return ProxyHeader(end + 1, False, None)
    match = _V1_LINE.fullmatch(line.decode("latin-1"))
    if match is None or int(match[4]) > 65535 or int(match[5]) > 65535:
        raise ProxyHeaderError("version 1: its line is malformed")
    try:
        for host in (match[2], match[3]):
            socket.inet_pton(_FAMILIES[match[1]], host)
    except OSError:
        raise ProxyHeaderError("version 1: an address is malformed") from None
    return ProxyHeader(end + 1, False, (match[2], int(match[4])))


def _read_v2(data: bytes) -> ProxyHeader | None:
    if len(data) < _V2_FIXED_BYTES:
        return None
    command, family, num_bytes = data[12], data[13], int.from_bytes(data[14:16])
    if command not in (_LOCAL, _PROXIED):
        raise ProxyHeaderError("version 2: its version or command is unknown")
    if num_bytes > MAX_V2_BYTES:
        raise ProxyHeaderError(f"version 2: it has {num_bytes} bytes, at most {MAX_V2_BYTES} are read")
    if command == _PROXIED and family != _UNSPECIFIED:
        if family not in _ADDRESS_BYTES:
            raise ProxyHeaderError("version 2: its addresses are not of TCP over IPv4 or IPv6, nor of a unix socket")
        if num_bytes < _ADDRESS_BYTES[family]:
            raise ProxyHeaderError("version 2: its addresses are cut off")
    end = _V2_FIXED_BYTES + num_bytes
    if len(data) < end:
        return None
    peername = None if command == _LOCAL else _v2_peername(family, data[_V2_FIXED_BYTES:end])
    return ProxyHeader(end, command == _LOCAL, peername)


def _v2_peername(family: int, block: bytes) -> tuple[str, int] | str | None:
    match family:
        case 0x11:
            return socket.inet_ntop(socket.AF_INET, block[:4]), int.from_bytes(block[8:10])
        case 0x21:
            return socket.inet_ntop(socket.AF_INET6, block[:16]), int.from_bytes(block[32:34])
        case 0x31:
            return ""
    return None
