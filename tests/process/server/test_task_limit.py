"""At the limit of tasks a server has all that it needs from the start, or does not start, and says why."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.serving import eventually, running_server
from tests.support.task_limit import limited, task_cgroup

_STAY = 13
"""Of a server with one model, gateway and worker (docs/operating.md). One more looks at files, for a moment."""
_FLAGS = ("--engine", "dummy", "--workers", "1", "--gateways", "1")


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with task_cgroup() as folder:
        if folder is None:
            pytest.skip("no cgroup with a limit on tasks can be made here")
        yield folder


def test_a_server_that_is_ready_at_the_limit_serves_everything(cgroup: Path) -> None:
    with running_server(*_FLAGS, command=limited(cgroup, _STAY + 1)) as server:

        def ask(n: int) -> int:
            path = ("/v1/embeddings", "/metrics", "/stats", "/info")[n % 4]
            body = {"input": [f"a text {n}"] * 40} if n % 4 == 0 else None
            return httpx.request("POST" if body else "GET", server.url + path, json=body, timeout=30).status_code

        with ThreadPoolExecutor(8) as clients:
            assert set(clients.map(ask, range(160))) == {200}
        eventually(lambda: int((cgroup / "pids.current").read_text()) == _STAY)
        assert "no more threads or processes can be started" in server.reload_outcome()
        assert ask(0) == 200


def test_a_server_that_cannot_have_what_it_needs_says_so_in_its_last_line(cgroup: Path) -> None:
    with (
        pytest.raises(AssertionError, match="did not start") as failed,
        running_server(*_FLAGS, command=limited(cgroup, _STAY - 1)),
    ):
        pass
    last = str(failed.value).strip().splitlines()[-1]
    assert re.search(r"no more threads or processes can be started: .*pids\.max.*14 tasks", last), str(failed.value)
    assert "Traceback" not in str(failed.value)
