"""How long a model stays, as operators and Ollama's clients write it."""

import pytest

from vecd.shm.control import parse_keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0), (300, 300.0), (1.5, 1.5), ("0", 0.0), ("300", 300.0), (" 5m ", 300.0), ("1h30m", 5400.0),
        ("500ms", 0.5), (".5s", 0.5), (-1, None), ("-1", None), ("-5m", None), (float("inf"), None), (1e12, None),
        ("99999999999h", None),
    ],
)  # fmt: skip
def test_reads_seconds_and_durations(value: object, seconds: float | None) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize(
    "value", ["", "5 m", "m", "5x", "1e9", "--1", "-", "5m" * 20, None, True, [], {}, float("nan"), "١"]
)
def test_refuses_everything_else(value: object) -> None:
    with pytest.raises(ValueError, match="must be seconds or a duration"):
        parse_keep_alive(value)
