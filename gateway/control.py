"""The control channel between a gateway and its supervisor, as the gateway sees it.

Owns the reading of messages, the sending of reports, and the heartbeat. Knows no message but the heartbeat. Made by
`vecd.gateway.main`; `vecd.shm.control` describes the messages.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from vecd.shm.control import Channel, Heartbeat, Message

log = logging.getLogger("vecd.gateway")

_HEARTBEAT_S = 1.0
_SEND_AGAIN_S = 0.5


class Control:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._unsent: deque[Message] = deque()
        """Reports that the supervisor has had no room for, the oldest first."""

    def start(self, on_message: Callable[[Message, list[int]], None]) -> None:
        """Obey messages and send heartbeats from now on. `on_message`: takes a message and its descriptors, which are
        closed afterwards; does not wait. Call it on the running loop."""
        self._on_message = on_message
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self.read)
        self._beat()

    def stop(self) -> None:
        self._heartbeat.cancel()
        asyncio.get_running_loop().remove_reader(self._channel.fileno())

    def send(self, message: Message) -> None:
        """Report to the supervisor. While it does not read, messages are sent later, in their order, and the loop does
        not wait."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._send_unsent()

    def _send_unsent(self) -> None:
        while self._unsent:
            message = self._unsent.popleft()
            try:
                self._channel.send(message, waits=False)
            except BlockingIOError:
                self._unsent.appendleft(message)
                asyncio.get_running_loop().call_later(_SEND_AGAIN_S, self._send_unsent)
                return
            except OSError:
                self._unsent.clear()  # it is gone; the watching thread of `vecd.gateway.main` ends this process

    def _beat(self) -> None:
        """Tell the supervisor that the event loop runs."""
        with suppress(OSError):
            self._channel.send(Heartbeat(), waits=False)
        self._heartbeat = asyncio.get_running_loop().call_later(_HEARTBEAT_S, self._beat)

    def read(self) -> None:
        """Obey all messages that have come.

        Side effect: the process ends when one cannot be understood, or was lost because there were no descriptors left.
        A new gateway, which gets every message again, is better than one that has obeyed half of a message.
        """
        try:
            while (received := self._channel.receive(0)) is not None:
                message, fds = received
                try:
                    self._on_message(message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except BlockingIOError:
            return
        except Exception as error:
            log.critical("ends by a control message: %s", error, exc_info=not isinstance(error, OSError))
            os._exit(70)
        # The supervisor is gone; the watching thread of `vecd.gateway.main` ends this process.
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
