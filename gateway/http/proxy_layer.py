"""The beginning of a connection to a listener that expects the PROXY protocol (`--proxy-protocol`).

Owns a connection until the header of a trusted proxy has come, and its deadline. Parses nothing itself
(`vecd.gateway.http.proxy_protocol`). `vecd.gateway.http.server` makes one for each connection of such a listener, and
what follows it: a `TlsLayer`, because the header comes before the handshake, or a `Connection`. These get the socket's
transport, so a request costs nothing more.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from vecd.gateway.http.contract import Timeouts
from vecd.gateway.http.forwarded import TrustedProxies
from vecd.gateway.http.proxy_protocol import ProxyHeader, ProxyHeaderError, read_header


class ProxyHost(Protocol):
    """What a layer uses of its server."""

    timeouts: Timeouts
    trusted_proxies: TrustedProxies | None

    def await_header(self, layer: "ProxyLayer") -> bool:
        """Count a connection without a header; False when there are too many."""

    def end_awaiting(self, layer: "ProxyLayer", why_refused: str | None = None) -> None:
        """Count it no more. `why_refused`: for the log; None: its header has come, or it was closed by its client."""


class ProxyLayer(asyncio.Protocol):
    """The protocol of a socket's transport until the header has come."""

    def __init__(
        self, host: ProxyHost, make_next: Callable[[ProxyHeader], asyncio.Protocol], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._host = host
        self._make_next = make_next
        self._loop = loop
        self._data = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._host.await_header(self):
            self.abort()
            return
        trusted = self._host.trusted_proxies
        if trusted is None or not trusted.trusts(transport.get_extra_info("peername")):
            self._refuse("its peer is not in --trusted-proxies")
            return
        timeout_s = self._host.timeouts.head_s
        self._timer = self._loop.call_later(timeout_s, self._refuse, f"it was not complete after {timeout_s:g} s")

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._data += data
        try:
            header = read_header(self._data)
        except ProxyHeaderError as error:
            self._refuse(str(error))
            return
        if header is None:
            return
        self._leave()
        following = self._make_next(header)
        self._transport.set_protocol(following)
        following.connection_made(self._transport)
        if len(self._data) > header.num_bytes:
            following.data_received(self._data[header.num_bytes :])

    def connection_lost(self, exc: Exception | None) -> None:
        # A check that only connects is no fault.
        self._leave("it was closed before its header was complete" if self._data else None)

    def abort(self) -> None:
        self._transport.abort()

    def _refuse(self, reason: str) -> None:
        self._leave(reason)
        self._transport.abort()

    def _leave(self, why_refused: str | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._host.end_awaiting(self, why_refused)
