"""Whose processes and sockets unit tests are stopped for."""

import sys
import threading
from collections.abc import Iterator

import pytest

_CONNECT = "socket.connect"


class Connecting:
    """A thread that connects when it is told to, as far as an audit hook sees."""

    def __init__(self) -> None:
        self.is_refused: bool | None = None
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._told.wait()
        try:
            sys.audit(_CONNECT)
        except AssertionError:
            self.is_refused = True
        else:
            self.is_refused = False

    def finish(self) -> bool | None:
        self._told.set()
        self._thread.join()
        return self.is_refused


@pytest.fixture
def earlier() -> Iterator[Connecting]:
    """Begun before the test, as the threads of other folders' servers are in a run of one process."""
    connecting = Connecting()
    yield connecting
    connecting.finish()


def test_only_what_the_test_itself_does_is_refused(earlier: Connecting) -> None:
    assert earlier.finish() is False
    assert Connecting().finish() is True
    with pytest.raises(AssertionError, match=f"{_CONNECT} in a unit test"):
        sys.audit(_CONNECT)
