import io
import math

import pytest

from vecd.client.bench import progress as progress_module
from vecd.client.bench.progress import ProgressLine, describe
from vecd.client.bench.run import Progress


def make_progress(**changes: object) -> Progress:
    fields: dict[str, object] = {
        "is_warming_up": False,
        "elapsed_s": 2.0,
        "left_s": 7.2,
        "num_requests": 500,
        "num_errors": 3,
        "num_waiting": 4,
    }
    return Progress(**{**fields, **changes})  # type: ignore[arg-type]


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
def test_progress_in_words(progress: Progress, words: str) -> None:
    assert describe(progress) == words


def test_the_line_is_rewritten_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_REDRAW_S", 0.0)
    stream = io.StringIO()
    line = ProgressLine(stream, is_shown=True)
    line.show("16 clients", make_progress())
    line.show("16 clients", make_progress(left_s=1.0))
    assert stream.getvalue().count("\r") == 2
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("16 clients: 250.0 req/s, 3 errors, 1 s left")
    line.clear()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_the_line_is_not_rewritten_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_REDRAW_S", 1000.0)
    stream = io.StringIO()
    line = ProgressLine(stream, is_shown=True)
    for _ in range(5):
        line.show("16 clients", make_progress())
    assert stream.getvalue().count("16 clients") == 1


def test_without_a_terminal_nothing_is_written() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.show("16 clients", make_progress())
    line.clear()
    assert stream.getvalue() == ""


def test_a_terminal_that_goes_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    line = ProgressLine(Gone(), is_shown=True)
    line.show("16 clients", make_progress())
    line.clear()
