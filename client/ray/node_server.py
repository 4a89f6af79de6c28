"""The `vecd serve` of one Ray actor: on unix sockets of its own, alive exactly as long as the actor's process.

Owns the two directions of dying together: the server ends with this process (`vecd.client.local_server`), and a thread
waits for it, and says when it has ended by itself. VECD_COMMAND replaces the `vecd` command.
"""

import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence

from vecd.client.local_server import VECD, LocalServer

_SERVED_HERE = ("--host", "--port", "--uds", "--admin-port", "--admin-uds", "--ready-fd", "--tls-cert", "--tls-key")


class NodeServer:
    """A server that is being started. `await_ready` waits for it, `stop` ends it."""

    def __init__(self, model: str | None, flags: Sequence[str], on_death: Callable[[str], None]) -> None:
        """`on_death` is called with the reason, by another thread, when vecd ends between `await_ready` and `stop`.

        Raises ValueError for a flag that says where to listen: that is chosen here.
        """
        for flag in flags:
            if flag.partition("=")[0] in _SERVED_HERE:
                raise ValueError(f"{flag}: where the server of a node listens is chosen by vecd.client.ray")
        self._server = LocalServer(
            [*([model] if model else []), *flags],
            sockets={"--uds": "public", "--admin-uds": "admin"},
            command=shlex.split(os.environ.get("VECD_COMMAND", "")) or VECD,
            log_fd=2,
        )
        self.path, self.admin_path = self._server.path("public"), self._server.path("admin")
        """The second has /stats, /metrics and /admin, which are not for callers of the fleet."""
        self._on_death = on_death
        self._is_stopping = False
        self.pid = 0
        """Of the supervisor, behind `await_ready`."""

    def await_ready(self) -> None:
        """Raises NotStarted when the server ends before it is ready, or is not within ten minutes: a first start may
        download a model, and compares engines. Its log is this process's stderr."""
        self.pid = self._server.await_ready()["pid"]
        threading.Thread(target=self._watch, name="vecd", daemon=True).start()

    def stop(self) -> None:
        """Let the server finish its requests and end; after 45 s, kill it."""
        self._is_stopping = True
        self._server.stop()

    def _watch(self) -> None:
        code = self._server.wait()
        if not self._is_stopping:
            self._on_death(f"vecd has ended with {code}")


def exit_at_once(reason: str) -> None:
    """End this process: what it has not answered, the proxy or Ray then gives to another node."""
    print(f"{reason}: this actor ends, too", file=sys.stderr, flush=True)
    os._exit(70)
