import io
import math

import pytest

from vecd.client import status_line as status_line_module
from vecd.client.bench.run import RunProgress
from vecd.client.status_line import StatusLine


def make_progress(**changes: object) -> RunProgress:
    fields: dict[str, object] = {
        "is_warming_up": False,
        "elapsed_s": 2.0,
        "left_s": 7.2,
        "num_requests": 500,
        "num_errors": 3,
        "num_waiting": 4,
    }
    return RunProgress(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (make_progress(), "250.0 req/s, 3 errors, 8 s left"),
        (make_progress(left_s=0.0), "250.0 req/s, 3 errors, waiting for 4 answers"),
        (make_progress(left_s=math.inf), "250.0 req/s, 3 errors, 500 answered"),
        (make_progress(elapsed_s=0.0, num_requests=0), "0.0 req/s, 3 errors, 8 s left"),
        (make_progress(is_warming_up=True), "warming up"),
    ],
)
def test_progress_in_words(progress: RunProgress, words: str) -> None:
    assert progress.describe() == words


def test_the_line_is_rewritten_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line_module, "_REDRAW_S", 0.0)
    stream = io.StringIO()
    line = StatusLine("vecd bench", stream, is_live=True)
    line.show(lambda: f"16 clients: {make_progress().describe()}")
    line.show(lambda: f"16 clients: {make_progress(left_s=1.0).describe()}")
    assert stream.getvalue().count("\r") == 2
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("16 clients: 250.0 req/s, 3 errors, 1 s left")
    line.clear()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_the_line_is_not_rewritten_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line_module, "_REDRAW_S", 1000.0)
    stream = io.StringIO()
    line = StatusLine("vecd bench", stream, is_live=True)
    for _ in range(5):
        line.show(lambda: f"16 clients: {make_progress().describe()}")
    assert stream.getvalue().count("16 clients") == 1


def test_without_a_terminal_nothing_is_written() -> None:
    stream = io.StringIO()
    line = StatusLine("vecd bench", stream)
    line.show(lambda: f"16 clients: {make_progress().describe()}")
    line.clear()
    assert stream.getvalue() == ""


def test_a_terminal_that_goes_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    line = StatusLine("vecd bench", Gone(), is_live=True)
    line.show(lambda: f"16 clients: {make_progress().describe()}")
    line.clear()
