"""Unit tests start no process and open no socket. Whatever tries is stopped here: its test belongs in `tests/process`.

Event loops are allowed, and so are the socket pairs that they wake themselves with.
"""

import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).parent
_FORBIDDEN = frozenset({"socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})
"""Audit events."""
_running: list[str] = []
"""The test that runs, if any."""
_earlier: set[threading.Thread] = set()
"""The threads that were there before it, but for its own: in a run of one process, those of other folders' fixtures."""


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if _running and event in _FORBIDDEN and threading.current_thread() not in _earlier:
        raise AssertionError(f"{event} in a unit test: such tests are in tests/process")


sys.addaudithook(_refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    # Not the whole protocol: the last test of a run ends the servers of other folders, too.
    if item.path.is_relative_to(_FOLDER):  # pytest calls this one for the tests of every folder
        _earlier.update(set(threading.enumerate()) - {threading.current_thread()})
        _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.clear()
        _earlier.clear()
