"""The control channel between a gateway and its supervisor, as the gateway sees it.

Owns the reading of messages, which become calls of `Generations`, the sending of reports, and the heartbeat. Decides
nothing about what is served. Made by `vecd.gateway.main`; `vecd.shm.control` describes the messages.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from vecd.gateway.types.config import ApiKey
from vecd.shm.control import (
    Activate,
    Channel,
    Discard,
    Drain,
    Heartbeat,
    InputDeaths,
    InputsCleared,
    Message,
    ModelBroken,
    NewKeys,
    Prepare,
    Quarantined,
    WorkerDown,
    WorkerUp,
)

log = logging.getLogger("vecd.gateway")

_HEARTBEAT_S = 1.0
_SEND_AGAIN_S = 0.5


class Generations(Protocol):
    """What the supervisor may change in a running gateway; one method for each message. None of them waits."""

    def worker_up(self, message: WorkerUp, arena_fd: int) -> None:
        """`arena_fd` is the caller's, and is closed afterwards."""

    def worker_down(self, message: WorkerDown) -> None: ...

    def set_broken(self, generation: int, reason: str) -> None: ...

    def add_to_quarantine(self, digest: str) -> None: ...

    def note_deaths(self, message: InputDeaths) -> None: ...

    def note_cleared(self, digests: list[str]) -> None: ...

    def set_keys(self, keys: Sequence[ApiKey]) -> None: ...

    def prepare(self, message: Prepare, zmq_listening: socket.socket) -> None:
        """Takes the ownership of `zmq_listening`."""

    def activate(self, generation: int) -> None: ...

    def discard(self, generation: int) -> None: ...


class Control:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def start(self, generations: Generations, on_drain: Callable[[float, float], None]) -> None:
        """Obey messages and send heartbeats from now on. `on_drain`: takes the deadline and the grace of a drain, in
        seconds. Call it on the running loop."""
        self._generations = generations
        self._on_drain = on_drain
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self.read)
        self._beat()

    def stop(self) -> None:
        self._heartbeat.cancel()
        asyncio.get_running_loop().remove_reader(self._channel.fileno())

    def send(self, message: Message) -> None:
        """Report to the supervisor. While it does not read, the message is sent later, and the loop does not wait."""
        try:
            self._channel.send(message, waits=False)
        except BlockingIOError:
            asyncio.get_running_loop().call_later(_SEND_AGAIN_S, self.send, message)
        except OSError:
            pass  # it is gone; the watching thread of `vecd.gateway.main` ends this process

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
                    self._obey(message, fds)
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

    def _obey(self, message: Message, fds: list[int]) -> None:
        generations = self._generations
        match message:
            case WorkerUp():
                generations.worker_up(message, fds[0])
            case WorkerDown():
                generations.worker_down(message)
            case ModelBroken():
                generations.set_broken(message.generation, message.reason)
            case Quarantined():
                generations.add_to_quarantine(message.digest)
            case InputDeaths():
                generations.note_deaths(message)
            case InputsCleared():
                generations.note_cleared(message.digests)
            case NewKeys():
                generations.set_keys(tuple(ApiKey.from_json(key) for key in message.keys))
            case Prepare():
                generations.prepare(message, socket.socket(fileno=os.dup(fds[0])))
            case Activate():
                generations.activate(message.generation)
            case Discard():
                generations.discard(message.generation)
            case Drain():
                self._on_drain(message.deadline_s, message.grace_s)
