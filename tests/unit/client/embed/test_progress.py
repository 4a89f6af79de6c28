import io

import pytest

from vecd.base.status_line import StatusLine
from vecd.client.embed.rows import Position
from vecd.client.embed.run import Course, WaitMessages, in_words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0:00 min"), (59.6, "1:00 min"), (3599, "59:59 min"), (3600, "1:00 h"), (90_061, "25:01 h")],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def at(num_rows: int, num_bytes: int) -> Position:
    return Position(row=num_rows, num_bytes=num_bytes)


def test_rates_and_time_left_are_of_the_last_half_minute() -> None:
    course = Course(10_000, 0.0, at(500, 1000), 0)
    assert course.describe(5.0) == f" 10% {'━' * 2}{'╌' * 22} 500 rows"
    course.add(10.0, at(600, 2000), 1000)
    assert course.describe(10.0) == f" 20% {'━' * 4}{'╌' * 20} 600 rows, 10 rows/s, 100 tokens/s, 1:20 min left"
    for second in range(11, 61):
        course.add(float(second), at(600 + 100 * (second - 10), 2000 + 100 * (second - 10)), 1000)
    words = course.describe(60.0)
    assert words == f" 70% {'━' * 16}{'╌' * 8} 5,600 rows, 100 rows/s, 0 tokens/s, 0:30 min left"


def test_how_long_it_takes_is_not_known_at_once_behind_a_journal_of_an_older_version() -> None:
    """It says how many rows are done, and not how many bytes."""
    course = Course(10_000, 0.0, at(500, 0), 0)
    course.add(1.0, at(600, 6000), 1000)
    assert course.describe(1.0).endswith(" 600 rows, 100 rows/s, 1,000 tokens/s")
    course.add(31.0, at(700, 7000), 2000)
    course.add(61.0, at(800, 8000), 3000)
    assert course.describe(61.0).endswith(", 1:00 min left")


def test_how_long_a_pipe_takes_is_not_known() -> None:
    """Before the first response, requested rows are all that there is to see."""
    course = Course(0, 0.0, at(0, 0), 0)
    assert course.describe(1.0, 1024) == "0 rows, 1,024 in flight"
    course.add(1.0, at(10, 30), 20)
    assert course.describe(1.0) == "10 rows, 10 rows/s, 20 tokens/s"


def test_what_is_waited_for_is_said_at_once_and_again_but_not_all_the_time() -> None:
    messages = WaitMessages("http://x:1", 600)
    said = {second: line for second in range(100) if (line := messages.next(float(second), "Connection refused"))}
    assert list(said) == [0, 10, 30, 70]
    assert said[0] == "http://x:1: Connection refused. Trying again for up to 600 s (--retry-for)"
    assert said[10] == "still waiting for http://x:1 after 10 s: Connection refused. Giving up in 590 s"


def test_a_server_that_is_busy_now_and_then_is_not_told_of_each_time() -> None:
    messages = WaitMessages("http://x:1", 600)
    said = [second for second in range(30) if messages.next(float(second), "busy" if second % 3 == 0 else "")]
    assert said == [0, 12, 24]


def test_a_terminal_has_one_line_and_a_log_several() -> None:
    texts = {}
    for is_live in (True, False):
        line = StatusLine("vecd embed", stream := io.StringIO(), is_live=is_live, plain_s=0.0)
        line.show(lambda: "half")
        line.clear()  # so that the next one is drawn at once
        line.show(lambda: "more")
        line.say("done")
        line.silence()
        line.show(lambda: "nothing")
        line.say("end")
        texts[is_live] = stream.getvalue()
    clear = "\r\x1b[K"
    assert texts[True] == f"{clear}half{clear}{clear}more{clear}vecd embed: done\nvecd embed: end\n"
    assert texts[False] == "".join(f"vecd embed: {text}\n" for text in ("half", "more", "done", "end"))
