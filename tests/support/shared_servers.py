"""One server per set of flags for a whole run of the tests: tests that only send requests need none of their own.

The process of a run that ends last, the one that the others belong to, starts and stops them, and the tests of all
processes ask it on a Unix socket. So they end after all tests, and must leave nothing behind, as any server of a test.
"""

import json
import socket
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from threading import Thread

from tests.support.serving import START_TIMEOUT_S, RunningServer, cache_folder, running_server

DUMMY = ("--engine", "dummy", "--workers", "1")
"""The flags that most tests use."""


class Keeper:
    """Starts each server when a test first asks for it, one after the other."""

    def __init__(self) -> None:
        self.failure: str | None = None
        """What a server has done wrong: said at the end."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_address())
        self._listener.listen(64)
        self._thread = Thread(target=self._keep, name="keeper", daemon=True)
        self._thread.start()  # servers die with it, and not only with the process

    def close(self) -> None:
        with suppress(OSError):  # it has failed and ended
            _ask(None)
        self._thread.join()

    def _keep(self) -> None:
        try:
            with self._listener, ExitStack() as servers:
                self._answer(servers)
        except Exception as error:
            self.failure = repr(error)

    def _answer(self, servers: ExitStack) -> None:
        answers: dict[tuple[str, ...], dict[str, object]] = {}
        while True:
            asking, _ = self._listener.accept()
            with suppress(OSError), asking, asking.makefile("rw") as file:  # who asks may have been killed
                if not (line := file.readline()):
                    continue
                if (asked := json.loads(line)) is None:
                    return
                flags = tuple(asked)
                if flags not in answers:
                    try:
                        answers[flags] = servers.enter_context(running_server(*flags)).to_json()
                    except Exception as error:
                        answers[flags] = {"error": str(error)}
                file.write(json.dumps(answers[flags]) + "\n")


@cache
def shared_server(*flags: str) -> RunningServer:
    """A server that tests of other processes send requests to, too: no test may stop it, change it, or count what it
    has done.
    """
    answer = json.loads(_ask(flags))
    assert "error" not in answer, answer["error"]
    return RunningServer.from_json(answer)


def _ask(flags: tuple[str, ...] | None) -> str:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(3 * START_TIMEOUT_S)  # others may be started before
        sock.connect(_address())
        with sock.makefile("rw") as file:
            file.write(json.dumps(flags) + "\n")
            file.flush()
            return file.readline()


def _address() -> str:
    return str(Path(cache_folder(), "servers.sock"))
