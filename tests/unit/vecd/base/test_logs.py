"""The log's two formats, its limits, and stderr that nobody reads."""

import json
import logging
import os
import re
import sys
from datetime import datetime

import pytest

from vecd.base import logs
from vecd.base import logs as stderr_module
from vecd.base.logs import MAX_KEPT_BYTES, JsonFormatter, LogHandler, Repeats, Stderr, TextFormatter, is_journal


def record(message: str, *args: object, level: int = logging.INFO, name: str = "vecd.x") -> logging.LogRecord:
    return logging.LogRecord(name, level, "x.py", 1, message, args, None)


def failed() -> logging.LogRecord:
    made = record("it failed", level=logging.ERROR)
    try:
        raise KeyError("why")
    except KeyError:
        made.exc_info = sys.exc_info()
    return made


# --- formats --------------------------------------------------------------------------------------------------------


def test_a_line_of_text_is_as_people_know_it():
    line = TextFormatter("worker-0").format(record("%d batches", 3))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} worker-0 INFO 3 batches", line)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x85", "\u2028", "\x0b"])
def test_no_message_can_look_like_another_line(end):
    line = TextFormatter("gateway").format(record("a%s2026-01-01 00:00:00,000 supervisor ERROR forged", end))
    assert not [part for part in line.splitlines()[1:] if not part.startswith("    ")]


def test_nothing_in_a_message_moves_a_terminal_s_cursor():
    line = TextFormatter("gateway").format(record("\x1b[2J\x07 déjà\tvu"))
    assert line.endswith("\\x1b[2J\\x07 déjà\tvu")


def test_a_traceback_is_indented():
    lines = TextFormatter("gateway").format(failed()).splitlines()
    assert lines[1] == "    Traceback (most recent call last):"
    assert lines[-1] == "    KeyError: 'why'"


def test_the_journal_is_told_each_line_s_priority():
    lines = TextFormatter("gateway", is_journal=True).format(failed()).splitlines()
    assert {line[:3] for line in lines} == {"<3>"}
    assert TextFormatter("gateway", is_journal=True).format(record("x")).startswith("<6>2")


def test_a_line_of_json_has_all_there_is():
    made = failed()
    made.fields = {"event": "x", "count": 3}
    line = JsonFormatter("gateway").format(made)
    said = json.loads(line)
    assert "\n" not in line
    assert list(said)[:5] == ["time", "level", "process", "logger", "message"]
    assert (said["level"], said["process"], said["logger"], said["message"]) == (
        "error", "gateway", "vecd.x", "it failed",
    )  # fmt: skip
    assert (said["event"], said["count"]) == ("x", 3)
    assert said["exception"].startswith("Traceback")
    assert said["exception"].endswith("KeyError: 'why'")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["time"])
    assert abs(datetime.fromisoformat(said["time"]).timestamp() - made.created) < 0.002


def test_json_takes_any_string():
    message = 'a"\n\x00\ud800\u2028é'
    line = JsonFormatter("gateway").format(record(message))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == message


def test_stderr_is_the_journal_where_systemd_says_so(monkeypatch, tmp_path):
    with (tmp_path / "log").open("w") as file:
        found = os.fstat(file.fileno())
        for said, is_so in (
            (f"{found.st_dev}:{found.st_ino}", True),
            (f"{found.st_dev}:{found.st_ino + 1}", False),
            ("", False),
        ):
            monkeypatch.setenv("JOURNAL_STREAM", said)
            assert is_journal(file.fileno()) is is_so


# --- floods ---------------------------------------------------------------------------------------------------------


def test_of_messages_of_one_kind_only_so_many_a_second_are_written():
    now = [0.0]
    repeats = Repeats(lambda: now[0])
    assert sum(repeats.filter(record("request %s: 503", n)) for n in range(250)) == 100
    assert repeats.filter(record("another kind"))
    assert repeats.filter(record("request %s: 503", 1, level=logging.ERROR))
    now[0] = 1.0
    passed = [made for n in range(40) if repeats.filter(made := record("request %s: 503", n))]
    assert len(passed) == 20
    assert passed[0].getMessage() == "request 0: 503 (and 150 more like it, not logged)"
    assert passed[1].getMessage() == "request 1: 503"


def test_messages_without_a_template_cost_no_memory():
    repeats = Repeats(lambda: 0.0)
    for n in range(5000):
        repeats.filter(record(f"message {n}"))
    assert len(repeats._kinds) <= 512


# --- stderr ---------------------------------------------------------------------------------------------------------


class Pipe:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def fill(self) -> int:
        os.set_blocking(self.writer, False)
        num_bytes = 0
        try:
            while True:
                num_bytes += os.write(self.writer, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(self.writer, True)
            return num_bytes

    def read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data += os.read(self.reader, num_bytes - len(data))
        return data

    def read_all(self) -> bytes:
        os.set_blocking(self.reader, False)
        try:
            return os.read(self.reader, 1 << 20)
        except BlockingIOError:
            return b""


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    for fd in (made.reader, made.writer):
        os.close(fd)


@pytest.fixture(params=["opened anew", "as it is"])
def way(request, monkeypatch):
    """Where the descriptor cannot be opened by /proc, it is polled."""
    if request.param == "as it is":

        def forbidden(fd: int) -> int:
            raise PermissionError

        monkeypatch.setattr(stderr_module, "_open_anew", forbidden)


def test_lines_that_there_is_no_room_for_wait_and_come_in_order(way, pipe):
    num_bytes = pipe.fill()
    stderr = Stderr(pipe.writer)
    for n in range(100):
        stderr.write(b"line %d\n" % n)
    lines = b"".join(b"line %d\n" % n for n in range(100))
    assert pipe.read(num_bytes) == b"x" * num_bytes
    assert pipe.read(len(lines)) == lines
    stderr.flush(5)
    stderr.close()


def test_what_is_too_much_is_lost_and_told(way, pipe):
    lost = []
    num_bytes = pipe.fill()
    stderr = Stderr(pipe.writer, tell_lost=lambda num: b"%d lost\n" % num)
    stderr.on_lost = lambda: lost.append(1)
    line = b"y" * 1023 + b"\n"
    num_kept = MAX_KEPT_BYTES // len(line)
    for _ in range(num_kept + 7):
        stderr.write(line)
    assert len(lost) == 7
    pipe.read(num_bytes)
    assert pipe.read(num_kept * len(line)) == line * num_kept
    assert pipe.read(len(b"7 lost\n")) == b"7 lost\n"
    stderr.close()


def test_a_long_line_comes_whole(way, pipe):
    stderr = Stderr(pipe.writer)
    line = b"z" * (MAX_KEPT_BYTES + 200_000) + b"\n"
    stderr.write(line)
    assert pipe.read(len(line)) == line
    stderr.close()


def test_a_process_without_threads_writes_what_it_kept_with_the_next_line(pipe):
    num_bytes = pipe.fill()
    stderr = Stderr(pipe.writer, has_thread=False)
    stderr.write(b"one\n")
    pipe.read(num_bytes)
    assert pipe.read_all() == b""
    stderr.write(b"two\n")
    assert pipe.read_all() == b"one\ntwo\n"
    stderr.close()


def test_others_who_have_the_descriptor_still_wait_on_it(pipe):
    Stderr(pipe.writer).close()
    assert os.get_blocking(pipe.writer)


def test_a_reader_who_has_gone_is_no_reason_to_stop(way, pipe):
    pipe.fill()
    stderr = Stderr(pipe.writer)
    stderr.write(b"kept\n")
    os.dup2(pipe.writer, pipe.reader)  # there is no other reader
    stderr.write(b"another\n")
    stderr.flush(5)
    stderr.close()


def test_a_file_is_appended_to(tmp_path):
    """Also where whoever opened it did not say so: a descriptor of our own would begin at its beginning."""
    path = tmp_path / "log"
    with path.open("wb", buffering=0) as file:
        file.write(b"theirs\n")
        stderr = Stderr(file.fileno())
        stderr.write(b"ours\n")
        file.write(b"theirs again\n")
        stderr.write(b"ours again\n")
        stderr.close()
    assert path.read_bytes() == b"theirs\nours\ntheirs again\nours again\n"


# --- the handler ----------------------------------------------------------------------------------------------------


@pytest.fixture
def handler(pipe):
    made = LogHandler("gateway", "json", pipe.writer)
    yield made
    made.close()


def test_a_line_that_cannot_be_formatted_quotes_nothing(handler, pipe):
    handler.handle(record("%d texts", "a caller's"))
    said = json.loads(pipe.read_all())
    assert said["message"] == "a line of vecd.x cannot be formatted: TypeError"


@pytest.mark.slow
def test_lost_lines_are_told_of_in_the_same_format(handler, pipe):
    num_bytes = pipe.fill()
    for _ in range(400):
        handler.handle(record("x" * 1000, name=logs.ACCESS))
    pipe.read(num_bytes)
    handler.out.flush(5)
    text = b""
    while b"lines_lost" not in text:
        text += os.read(pipe.reader, 1 << 20)
    last = json.loads(text.splitlines()[-1])
    assert (last["event"], last["level"]) == ("lines_lost", "warning")
    assert last["count"] + len(text.splitlines()) - 1 == 400


def test_what_the_operator_is_told_at_the_start(handler, pipe, monkeypatch, capsys):
    logs.say("before anything is set up")
    assert capsys.readouterr().err == "vecd: before anything is set up\n"
    monkeypatch.setattr(logs, "_handler", handler)
    logs.say("loading", logging.WARNING, stage=1)
    logs.announce(["vecd is ready", "  a\n  b"], event="ready", url="http://x")
    loading, ready = map(json.loads, pipe.read_all().splitlines())
    assert (loading["message"], loading["level"], loading["stage"]) == ("loading", "warning", 1)
    assert (ready["message"], ready["event"], ready["url"]) == ("vecd is ready", "ready", "http://x")
    handler.set_format("text")
    logs.say("loading")
    logs.announce(["vecd is ready", "  try"], event="ready")
    assert pipe.read_all() == b"vecd: loading\nvecd is ready\n  try\n"
