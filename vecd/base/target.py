"""The address of a server, as a flag or a program gives it.

Owns its forms and what is refused in one. Connects to nothing.
"""

import os
import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl

_CREDENTIALS = re.compile(r"(?!unix:(?!//))([^/?#]*//)?[^/?#]*@")


class Target(NamedTuple):
    """Where a server listens: a host and port, or the path of a unix socket."""

    host: str
    port: int
    unix_path: str | None
    tls: "ssl.SSLContext | None" = None
    prefix: str = ""
    """In front of each path of the server's own, as a proxy may have it."""

    @property
    def host_header(self) -> str:
        if self.unix_path is not None:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{self.host_header}{self.prefix}" if self.unix_path is None else f"unix:{self.unix_path}"


def parse_target(url: str, ca: "str | os.PathLike[str] | None" = None, *, insecure: bool = False) -> Target:
    """Read "http://host:port", "https://host:port" or "unix:/path". Behind a port, a path is kept as a prefix, and a
    last /v1 of it is ignored. `ca`: a PEM file of certificates to trust, not the system's. `insecure`: trust any
    certificate. Raises ValueError with a line that says what is wrong; it does not quote a `url` with a password."""
    if _CREDENTIALS.match(url):
        raise ValueError(
            "the address has a user or a password in front of its host, which is never sent: leave it out, and give an "
            "API key as api_key=, --api-key or the variable VECD_API_KEY"
        )
    parts = urlsplit(url)
    if (ca is not None or insecure) and parts.scheme != "https":
        raise ValueError(f"--ca and --insecure mean something only with https://, not with {url!r}")
    if parts.scheme == "unix":
        if parts.netloc or not parts.path:
            raise ValueError(f"{url!r} names no socket: write unix:/path/to/socket")
        return Target("", 0, parts.path)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is neither http://host:port nor https://host:port nor unix:/path")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r} has a query or a fragment: only a path may follow the host")
    prefix = parts.path.rstrip("/").removesuffix("/v1")  # clients of OpenAI's API have /v1 in their addresses
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from error
    if parts.scheme == "http":
        return Target(parts.hostname, port or 80, None, None, prefix)
    import ssl  # what only reads flags does without

    try:
        tls = ssl.create_default_context(cafile=ca)
    except OSError as error:  # of which SSLError is one
        raise ValueError(f"--ca: {ca}: {error.strerror or error}") from error
    if insecure:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return Target(parts.hostname, port or 443, None, tls, prefix)
