"""The `vecd serve` of one Ray actor: on unix sockets of its own, alive exactly as long as the actor's process.

Owns the two directions of dying together: the server ends with this process (`vecd.client.local_server`), and a thread
waits for it, and says when it has ended by itself. VECD_COMMAND replaces the `vecd` command.
"""

import os
import shlex
import sys
import threading
from collections.abc import Sequence

from vecd.client.local_server import VECD, LocalServer

_SERVED_HERE = ("--host", "--port", "--uds", "--admin-port", "--admin-uds", "--ready-fd", "--tls-cert", "--tls-key")


class NodeServer(LocalServer):
    """Listens at `path("public")`, and at `path("admin")`, which has what is not for callers of the fleet: /stats,
    /metrics and /admin. Its log is this process's stderr."""

    def __init__(self, model: str | None, flags: Sequence[str]) -> None:
        """Raises ValueError for a flag that says where to listen: that is chosen here."""
        for flag in flags:
            if flag.partition("=")[0] in _SERVED_HERE:
                raise ValueError(f"{flag}: where the server of a node listens is chosen by vecd.client.ray")
        super().__init__(
            [*([model] if model else []), *flags],
            sockets={"--uds": "public", "--admin-uds": "admin"},
            command=shlex.split(os.environ.get("VECD_COMMAND", "")) or VECD,
            log_fd=2,
        )

    def serve(self) -> None:
        """Returns when it is ready. When vecd ends before `stop`, this process ends at once: what it has not answered,
        the proxy or Ray then gives to another node. Raises NotStarted when the server ends before it is ready, or is
        not within ten minutes: a first start may download a model, and compares engines."""
        self.await_ready()
        threading.Thread(target=self._watch, name="vecd", daemon=True).start()

    def _watch(self) -> None:
        code = self.wait()
        if not self.is_stopping:
            print(f"vecd has ended with {code}: this actor ends, too", file=sys.stderr, flush=True)
            os._exit(70)
