"""What `vecd bench` counts of a run, how it checks responses, and what it says of both."""

import io
import math
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from tests.support.loads import make_load
from vecd.base.status_line import StatusLine
from vecd.client.bench import report
from vecd.client.bench.load import RequestShape
from vecd.client.bench.report import (
    RunResult,
    Window,
    describe_progress,
    read_bytes,
    read_json,
    read_npy,
)
from vecd.client.http import BadResponse, ServerResponse

# --- which requests are measured --------------------------------------------------------------------------------

TIMED: dict[str, Any] = {}
COUNTED = {"num_requests": 3}
OPEN = {"rate_per_s": 5.0}
COUNTED_OPEN = {**COUNTED, **OPEN}


def window(how: dict[str, Any]) -> Window:
    """Opens at 102, and closes at 112 unless it is by number."""
    load = replace(make_load(how.get("rate_per_s")), num_requests=how.get("num_requests"))
    return Window(load, started_at=100)


@pytest.mark.parametrize(
    ("how", "question", "sent_at", "ended_at", "answer"),
    [
        # A closed loop by time: what ends inside; failures also after it.
        (TIMED, "measures", 101, 102, True),
        (TIMED, "measures", 111, 111.9, True),
        (TIMED, "measures", 111, 112, False),
        (TIMED, "measures_failure", 100, 101, False),
        (TIMED, "measures_failure", 111, 141, True),
        # An open loop by time: what arrives inside, however late it ends; the rate is of what ends inside.
        (OPEN, "measures", 102, 103, True),
        (OPEN, "measures", 111.9, 140, True),
        (OPEN, "measures_failure", 112, 112, False),
        (OPEN, "measures_failure", 111, 140, True),
        (OPEN, "counts", 101, 101.9, False),
        (OPEN, "counts", 111, 112, False),
        # By number: those requests, and none of the warm-up's.
        (COUNTED, "measures", 101, 103, False),
        (COUNTED, "measures", 103, 999, True),
        *((how, "counts", 101, 103, False) for how in (COUNTED, COUNTED_OPEN)),
        *((how, "counts", 103, 999, True) for how in (COUNTED, COUNTED_OPEN)),
    ],
)
def test_which_requests_belong_to_a_run(
    how: dict[str, Any], question: str, sent_at: float, ended_at: float, answer: bool
) -> None:
    assert getattr(window(how), question)(sent_at=sent_at, ended_at=ended_at) is answer


def test_a_timed_run_sends_until_it_closes_and_is_no_longer_than_it_should_be() -> None:
    timed = window(TIMED)
    assert [timed.may_send(now) for now in (100, 111.9, 112)] == [True, True, False]
    assert [timed.elapsed_s(now) for now in (101, 102, 107, 112, 120)] == [0, 0, 5, 10, 10]


def test_a_counted_run_sends_its_number_after_the_warmup_and_lasts_from_its_first_request() -> None:
    counted = window(COUNTED)
    assert all(counted.may_send(101) for _ in range(5))
    assert counted.elapsed_s(105) == 0
    assert [counted.may_send(now) for now in (103, 104, 104, 104)] == [True, True, True, False]
    assert counted.elapsed_s(108) == 5
    assert counted.closes_at == math.inf


# --- responses -------------------------------------------------------------------------------------------------


ITEM = {"object": "embedding", "index": 0, "embedding": [0.5, 0.5]}
USAGE = {"prompt_tokens": 9, "total_tokens": 9}


TOKENS = (b"x-vecd-tokens", b"9")


def dimensions(dim: int) -> tuple[bytes, bytes]:
    return b"x-vecd-dimensions", b"%d" % dim


def dump(*, indent: bool = False, **fields: object) -> ServerResponse:
    return ServerResponse(200, orjson.dumps(fields, option=orjson.OPT_INDENT_2 if indent else 0))


@pytest.mark.parametrize(
    ("answer", "num_texts", "num_tokens"),
    [
        (dump(object="list", data=[ITEM] * 64, model='"embedding":', usage=USAGE), 64, 9),
        (dump(indent=True, data=[ITEM, ITEM], usage=USAGE), 2, 9),
        (dump(usage=USAGE, data=[{**ITEM, "embedding": [0.5] * 1000}]), 1, 9),
        (dump(data=[ITEM], usage=None), 1, 0),
    ],
)
def test_embeddings_and_tokens_are_counted(answer: ServerResponse, num_texts: int, num_tokens: int) -> None:
    """Whatever the spacing and the order of the fields, and the name of the model."""
    assert read_json(answer, num_texts) == num_tokens


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        *((dump(data=[ITEM] * num, usage=USAGE), f"{num} embeddings for 2 texts") for num in (0, 1, 3)),
        (dump(data=[{**ITEM, "embedding": []}] * 2), ""),
        *((ServerResponse(200, body), "") for body in (b"", b"OK", b"[[0.5]]", b'{"data":{}}', b'{"data":[{}]}')),
    ],
)
def test_other_responses_are_bad(answer: ServerResponse, said: str) -> None:
    with pytest.raises(BadResponse, match=said or None):
        read_json(answer, 2)


@pytest.mark.parametrize(("num_texts", "dim"), [(1, 384), (7, 3)])
def test_bare_rows_are_counted_by_their_bytes(num_texts: int, dim: int) -> None:
    body = b"{" * (4 * num_texts * dim)  # as JSON may begin
    assert read_bytes(ServerResponse(200, body), num_texts) == 0
    assert read_bytes(ServerResponse(200, body, [TOKENS, dimensions(dim)]), num_texts) == 9


@pytest.mark.parametrize(("num_bytes", "dim"), [(0, None), (12, None), (7, None), (16, 3)])
def test_bytes_that_are_no_rows_are_bad_answers(num_bytes: int, dim: int | None) -> None:
    with pytest.raises(BadResponse, match="are not 2 rows"):
        read_bytes(ServerResponse(200, b"x" * num_bytes, [dimensions(dim)] if dim else []), 2)
    with pytest.raises(BadResponse, match="JSON"):
        read_bytes(ServerResponse(200, b'{"a": 1}'), 1)


def npy(rows: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, rows, version=version)
    return file.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "|i1"])
def test_a_numpy_file_has_a_row_a_text(version: tuple[int, int], dtype: str) -> None:
    body = npy(np.ones((3, 5), dtype), version)
    assert read_npy(ServerResponse(200, body, [TOKENS]), 3) == 9


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\xff\xff{",
        npy(np.ones((2, 5), "<f4")),
        npy(np.ones((3, 5), "<f4")) + b"x",
        npy(np.ones(15, "<f4")),
        npy(np.ones((3, 0), "<f4")),
        npy(np.ones((3, 5), "<f4")).replace(b"'<f4'", b"'<x4'"),
        npy(np.ones((3, 5), "<f4")).replace(b"shape", b"space"),
    ],
)
def test_what_is_not_such_a_file_is_a_bad_answer(body: bytes) -> None:
    with pytest.raises(BadResponse):
        read_npy(ServerResponse(200, body), 3)


# --- results ---------------------------------------------------------------------------------------------------


def bare_result(goodput_ms: float | None = None, elapsed_s: float = 2.0) -> RunResult:
    return RunResult(load=make_load(goodput_ms=goodput_ms), elapsed_s=elapsed_s)


def test_percentiles_are_by_the_nearest_rank() -> None:
    result = bare_result()
    for i in range(1000, 0, -1):
        result.latencies.append(i / 1000)
    figures = [500, 900, 990, 999, 1000, 500.5]
    assert list(result.latencies_ms().values()) == pytest.approx(figures)
    assert result.num_offered == 1000


def test_rates_are_of_successes() -> None:
    result = bare_result()
    result.num_requests, result.num_tokens = 10, 600
    result.add_errors("HTTP 503", "full", 4)
    assert [result.per_s(num) for num in (result.num_requests, result.num_texts, result.num_tokens)] == [5, 5, 300]
    assert result.errors.total() == 4
    nothing = bare_result(elapsed_s=0.0)  # a run that ended before it began
    assert nothing.per_s(5) == nothing.share(0) == 0.0


def test_goodput_is_a_share_of_everything_that_was_asked() -> None:
    result = bare_result(goodput_ms=50)
    result.latencies.extend((0.01, 0.05, 0.051, 3.0))
    result.add_errors("HTTP 429", "full", 4)
    assert (result.num_offered, result.num_good) == (8, 2)
    assert (result.share(result.num_good), result.per_s(result.num_good)) == (0.25, 1.0)


def make_result(
    num_measured: int = 1000, num_in_window: int = 1000, rate_per_s: float | None = None, **fields: Any
) -> RunResult:
    result = RunResult(**{"load": make_load(rate_per_s), "elapsed_s": 10.0, "cpu_share": 0.1, **fields})
    result.latencies.extend([0.005] * num_measured)
    result.num_requests += num_in_window
    return result


def test_a_row_has_a_cell_for_each_column() -> None:
    cells = report.row(make_result(rate_per_s=100)).split()
    assert cells[:2] == ["100", "/s"]
    assert len(cells) - 2 == len(report.heading().replace(" ms", "").replace("own CPU", "own").split()) - 1


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"cpu_share": 0.7}, ()),
        ({"rate_per_s": 100}, ()),
        ({"cpu_share": 0.71}, ("generator itself was busy",)),
        (
            {"rate_per_s": 100, "delays": array("d", [0.02] * 49 + [0.25])},
            ("the load generator was late: 5.0% of the requests", "at most 250 ms"),
        ),
        ({"num_in_window": 600, "rate_per_s": 100}, ("100.0 requests/s arrived, and 60.0/s were answered",)),
    ],
)
def test_what_is_said_of_a_run(result: dict[str, Any], said: tuple[str, ...]) -> None:
    notes = report.notes(make_result(**result))
    assert len(notes) == bool(said)
    assert all(words in notes[0] for words in said)


def test_errors_are_said_by_kind() -> None:
    result = make_result()
    result.add_errors("timeout", "no whole response in time")
    result.add_errors("HTTP 503", "a\n  b", 7)
    result.add_errors("timeout", "another one")  # the first detail of each kind is kept
    assert report.notes(result) == ["7 × HTTP 503: a b", "2 × timeout: no whole response in time"]
    assert list(report.fields(result)["errors"].items()) == [("HTTP 503", 7), ("timeout", 2)]


def test_each_rate_is_of_its_own_count() -> None:
    load = replace(make_load(), shape=RequestShape(texts_per_request=200))
    fields = report.fields(make_result(num_measured=30, num_in_window=20, load=load, num_tokens=12345))
    rates = [fields[f"{name}_per_s"] for name in ("offered", "requests", "texts", "tokens")]
    assert rates == [3.0, 2.0, 400.0, 1234.5]


def test_figures_that_are_not_there_are_null_and_dashes() -> None:
    result = make_result(0, 0)
    fields = report.fields(result)
    assert [fields[name] for name in ("p50_ms", "p999_ms", "mean_ms", "tokens_per_s")] == [None] * 4
    assert report.row(result).count("–") == 6


# --- progress --------------------------------------------------------------------------------------------------


def describe(now: float = 12.0, *, num_requests: int = 500, is_by_number: bool = False) -> str:
    """The progress of a run that measures from 10 to 20."""
    window = Window(replace(make_load(), num_requests=1000 if is_by_number else None), 8.0)
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


def test_the_line_is_drawn_once_in_a_while_and_cleared() -> None:
    stream = io.StringIO()
    line = StatusLine("vecd bench", stream, is_live=True)
    for _ in range(5):
        line.show(lambda: describe(19.5))
    assert stream.getvalue() == "\r\x1b[K4 clients: 52.6 req/s, 3 errors, 1 s left"
    line.clear()
    assert stream.getvalue().endswith("left\r\x1b[K")


def test_a_terminal_that_goes_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    line = StatusLine("vecd bench", Gone(), is_live=True)
    line.show(describe)
    line.clear()
