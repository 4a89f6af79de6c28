"""Read the first line of a request: its method, its target and its version.

Owns the grammar of that line (RFC 9112, section 3): which methods, versions and forms of a target are taken, and the
error for each other. Pure. Called by `vecd.gateway.http.http1`, which gives llhttp the header fields alone: llhttp
takes RTSP and ICE for HTTP, refuses versions that RFC 9110 (section 2.5) wants served, and does not tell a method that
it does not know from bytes that are no method.
"""

import re
from functools import lru_cache
from http import HTTPMethod
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from vecd.gateway.types.errors import BadRequest, HeadersTooLarge, HttpVersionNotSupported, NotImplementedByServer

_METHODS = {str(method) for method in HTTPMethod} - {"CONNECT"}
"""Those of RFC 9110 and 5789. A path that has others of them is answered by 405."""
_MAX_METHOD_BYTES = 32

_METHOD_BEGUN = re.compile(rb"[!#$%%&'*+.^_`|~0-9A-Za-z-]{1,%d}" % (_MAX_METHOD_BYTES + 1))
# Several spaces in a row have one meaning only.
_LINE = re.compile(rb"(\S+) +([\x21-\x7e]+) +HTTP/([0-9])\.([0-9])\r\n")
_SIMPLE_REQUEST = re.compile(rb"GET +/[\x21-\x7e]* *\r\n")
"""Of HTTP/0.9."""
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?]*)(.*)")

# RFC 9110, section 7.2; RFC 3986, section 3.2.2. Empty where the target has no authority. Without the comma: no name
# has one, but two Host headers that a proxy has joined do.
_AUTHORITY = re.compile(
    r"(?:(?:[A-Za-z0-9._~!$&'()*+;=-]|%[0-9A-Fa-f]{2})*|\[[0-9A-Fa-f:.]+\]|\[v[0-9A-Fa-f]+\.[\w.~!$&'()*+,;=:-]+\])"
    r"(?::[0-9]*)?",
    re.ASCII,
)
_INVALID_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


class RequestLine(NamedTuple):
    method: str
    path: str
    """Percent-decoded; "*" for the server as a whole."""
    query: bytes
    http_minor: int
    """0 or 1: a later version of HTTP/1 is served as 1.1."""


def check_line_begun(begun: bytes, max_target_bytes: int) -> None:
    """Check the first bytes of a request line, at least one, whose end is missing. Raises ApiError if no line that
    begins so is taken."""
    method = _METHOD_BEGUN.match(begun)
    if method is None:
        raise _malformed()
    if method.end() > _MAX_METHOD_BYTES:
        raise NotImplementedByServer(f"method: longer than {_MAX_METHOD_BYTES} bytes, none has so many")
    if begun[method.end() : method.end() + 1] not in (b"", b" "):
        raise _malformed()
    target = begun[method.end() :].lstrip(b" ").partition(b" ")[0].rstrip(b"\r\n")
    if len(target) > max_target_bytes:
        raise HeadersTooLarge(f"request target: longer than the {max_target_bytes} bytes allowed")


@lru_cache(maxsize=64)  # a server has few paths; without the cache, a tenth of the time of a small request
def parse_line(line: bytes, max_target_bytes: int) -> RequestLine:
    """Parse a request line with its end. Raises ApiError: BadRequest for a malformed line and for any protocol but
    HTTP, HttpVersionNotSupported, NotImplementedByServer for CONNECT and unknown methods, HeadersTooLarge."""
    check_line_begun(line, max_target_bytes)
    match = _LINE.fullmatch(line)
    if match is None:
        if _SIMPLE_REQUEST.fullmatch(line):
            raise _unsupported_version("0.9")
        raise _malformed()
    method, target, major, minor = match.groups()
    if major != b"1":
        raise _unsupported_version(f"{major.decode()}.{minor.decode()}")
    if method.decode() not in _METHODS:
        raise NotImplementedByServer(f"method {method.decode()}: not supported")
    return RequestLine(method.decode(), *_path_and_query(target), http_minor=min(1, int(minor)))


@lru_cache(maxsize=64)  # a server has few names
def is_authority(text: str) -> bool:
    """Whether `text` is a host name or address with an optional port, or empty."""
    return _AUTHORITY.fullmatch(text) is not None


def names_this_machine(authority: str) -> bool:
    """Whether a well-formed authority is localhost, a name below that, or an address, or is empty: no name that
    somebody else could let resolve to this machine."""
    name = authority[1:].partition("]")[0] if authority.startswith("[") else authority.partition(":")[0]
    if not name or f".{name.lower()}".endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _malformed() -> BadRequest:
    return BadRequest("not a well-formed HTTP request: Invalid request line, expected METHOD TARGET HTTP/1.1")


def _unsupported_version(version: str) -> HttpVersionNotSupported:
    return HttpVersionNotSupported(f"HTTP version {version}: only 1.1 and 1.0 are supported")


def _path_and_query(target: bytes) -> tuple[str, bytes]:
    """Split a request target: origin-form, absolute-form ("http://host/path"), or "*"."""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is not None:
        authority, rest = absolute.groups()
        target = rest if rest.startswith(b"/") else b"/" + rest
        if authority[:1] in (b"", b":") or not is_authority(authority.decode()):
            raise BadRequest("request target: no host name or address with an optional port after the scheme")
    path, _, query = target.partition(b"#")[0].partition(b"?")
    return _decoded_path(path), query


def _decoded_path(path: bytes) -> str:
    if not path.startswith(b"/") and path != b"*":
        raise BadRequest("request target: neither a path that starts with a slash nor a URL of http or https")
    if b"%" not in path:
        return path.decode("ascii")
    if _INVALID_ESCAPE.search(path):
        raise BadRequest("request target: a percent sign without two hexadecimal digits after it")
    try:
        decoded = unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        raise BadRequest("request target: the percent-decoded path is not UTF-8") from None
    if _CONTROL_CHARACTER.search(decoded):
        raise BadRequest("request target: a control character in the percent-decoded path")
    return decoded
