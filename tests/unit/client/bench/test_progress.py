import io

import pytest

from tests.support.loads import make_load
from vecd.client import status_line as status_line_module
from vecd.client.bench.report import describe_progress
from vecd.client.bench.result import RunResult
from vecd.client.bench.window import Window
from vecd.client.status_line import StatusLine


def describe(now: float = 12.0, *, num_requests: int = 500, is_by_number: bool = False) -> str:
    """The progress of a run that measures from 10 to 20."""
    window = Window(8.0, 2.0, 10.0, num_requests=1000 if is_by_number else None)
    if is_by_number:
        window.may_send(10.0)
    result = RunResult(load=make_load(), num_requests=num_requests)
    result.add_errors("timeout", "", 3)
    return describe_progress(window, result, 4, now)


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (describe(12.8), "4 clients: 178.6 req/s, 3 errors, 8 s left"),
        (describe(21.0), "4 clients: 50.0 req/s, 3 errors, waiting for 4 answers"),
        (describe(is_by_number=True), "4 clients: 250.0 req/s, 3 errors, 500 answered"),
        (describe(10.0, num_requests=0), "4 clients: 0.0 req/s, 3 errors, 10 s left"),
        (describe(9.0), "4 clients: warming up"),
    ],
)
def test_progress_in_words(progress: str, words: str) -> None:
    assert progress == words


def test_the_line_is_rewritten_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line_module, "_REDRAW_S", 0.0)
    stream = io.StringIO()
    line = StatusLine("vecd bench", stream, is_live=True)
    line.show(describe)
    line.show(lambda: describe(19.5))
    assert stream.getvalue().count("\r") == 2
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("4 clients: 52.6 req/s, 3 errors, 1 s left")
    line.clear()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_the_line_is_not_rewritten_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line_module, "_REDRAW_S", 1000.0)
    stream = io.StringIO()
    line = StatusLine("vecd bench", stream, is_live=True)
    for _ in range(5):
        line.show(describe)
    assert stream.getvalue().count("4 clients") == 1


def test_without_a_terminal_nothing_is_written() -> None:
    stream = io.StringIO()
    line = StatusLine("vecd bench", stream)
    line.show(describe)
    line.clear()
    assert stream.getvalue() == ""


def test_a_terminal_that_goes_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    line = StatusLine("vecd bench", Gone(), is_live=True)
    line.show(describe)
    line.clear()
