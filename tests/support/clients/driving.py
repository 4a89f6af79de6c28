"""Runs one client library in its environment, and calls it from a test.

Owns the process of a script and how the two speak: a line of JSON with the name of a function and its arguments goes to
its stdin, a line of JSON with what it returned, or raised, comes back on a pipe of its own, since libraries print.
"""

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.environments import Unavailable, command, is_node, prepare
from vecd.base.kernel import die_with_parent

SCRIPTS = Path(__file__).parent / "scripts"
_TIMEOUT_S = 120.0
"""For one call, the import of the library included, on a machine that does much else."""


class ClientError(Exception):
    """Raised when the library raised. What it said, and what callers can make out of it."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['classes'][0]}: {error['message']}")
        self.classes: list[str] = error["classes"]
        """Of the exception and all that it derives from."""
        self.message: str = error["message"]
        self.fields: dict[str, Any] = error["fields"]


class Client:
    """A script that runs, and its functions."""

    def __init__(self, process: subprocess.Popen[bytes], answers: int, stderr: Path) -> None:
        self._process, self._answers, self._stderr = process, answers, stderr

    def call(self, function: str, /, *, timeout_s: float = _TIMEOUT_S, **arguments: Any) -> Any:
        """What the script's function returns. Raises ClientError for what it raises."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then the answer says what is wrong
            self._process.stdin.write(json.dumps({"function": function, "arguments": arguments}).encode() + b"\n")
            self._process.stdin.flush()
        answer = json.loads(self._line(timeout_s))
        if "error" in answer:
            raise ClientError(answer["error"])
        return answer["result"]

    def refusal(self, function: str, /, **arguments: Any) -> ClientError:
        """What the script's function raises."""
        with pytest.raises(ClientError) as caught:
            self.call(function, **arguments)
        return caught.value

    def _line(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(b"\n"):
            readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._answers, 1 << 20) if readable else b""
            why = "died" if readable else f"did not answer in {timeout_s:.0f} s"
            assert piece, f"the client {why}: {self._stderr.read_text(errors='replace')[-4000:]}"
            pieces.append(piece)
        return b"".join(pieces)


@contextmanager
def running_client(name: str, script: str, settings: Mapping[str, str] | None = None) -> Iterator[Client]:
    """A script of `scripts/` in the environment `name`. Skips the test where that cannot be installed, and says why."""
    try:
        folder = prepare(name)
        run = command(name, folder)
    except Unavailable as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(prefix="vecd-client-") as home, open(Path(home, "stderr"), "wb") as stderr:
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [*run, *_arguments(name, script), str(writer)],
            pass_fds=[writer],
            stdin=subprocess.PIPE,
            stdout=stderr,
            stderr=stderr,
            # node looks for packages from the folder that it runs in
            cwd=folder if is_node(name) else home,
            env=_environment(home) | dict(settings or {}),
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (runs no Python that takes a lock)
        )
        os.close(writer)
        try:
            yield Client(process, reader, Path(stderr.name))
        finally:
            os.close(reader)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _arguments(name: str, script: str) -> list[str]:
    if not is_node(name):
        return [str(SCRIPTS / f"{script}.py")]
    # A module that is a file finds packages from where it lies; one that is an argument, from where it runs.
    return ["--input-type=module", "--eval", (SCRIPTS / f"{script}.mjs").read_text(), str(SCRIPTS / "serve.mjs")]


def _environment(home: str) -> dict[str, str]:
    """Nothing of ours, no proxy, nobody's account; and no library that reports home."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "HF_ENDPOINT": "http://127.0.0.1:9",  # not HF_HUB_OFFLINE, with which its client refuses all servers
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "ANONYMIZED_TELEMETRY": "False",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "MEM0_TELEMETRY": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
