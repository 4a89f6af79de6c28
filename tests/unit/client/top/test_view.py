"""How `vecd top` looks: every size of terminal, and what a reader must find."""

import io

import orjson
import pytest
from rich.console import Console

from vecd.client.top.figures import compute_figures, read_stats
from vecd.client.top.view import Scene, age, bar, duration, number, share, size, sparkline


def stats(num_workers: int, num_gateways: int, seconds: int):
    process = {"cpu_s": 1.0 + seconds, "resident_bytes": 3e8, "proportional_bytes": 123e6}
    done = seconds * 1000
    return read_stats(
        orjson.dumps(
            {
                "now_s": 100.0 + seconds,
                "model": {"id": "a-model", "dimensions": 384, "max_tokens": 256, "pooling": "mean"},
                "server": {"version": "1.2"},
                "requests": [{"dialect": "openai", "status": status, "count": done} for status in (200, 429)],
                "totals": dict.fromkeys(
                    ("inputs", "tokens", "padding_tokens", "batches", "sequences", "retried"), done
                ) | dict.fromkeys(("refused", "expired", "stuck", "poisoned"), 0),
                "batch_fill": {"bounds": [1.0], "counts": [0, 0], "sum": 0.0},
                "stage_bounds_s": [0.001, 1.0],
                "stages": {
                    stage: {"counts": [done, done, done], "sum_s": 1.0}
                    for stage in ("parse", "tokenize", "queue", "compute", "encode", "total")
                },
                "queue": {"requests": 1234567, "sequences": 2, "tokens": 3, "age_s": 0.25},
                "arena": {"rows": 2048, "rows_in_use": 2000},
                "workers": [
                    {"worker": n, "life": 3, "state": "stuck", "batches": done, "tokens": done, "busy_s": seconds * 0.9,
                     "pid": 4_000_000 + n, "dtype": "bfloat16", "path": "fused"}
                    for n in range(num_workers)
                ],
                "gateways": [
                    {"gateway": n, "pid": n, "uptime_s": 1e6, "connections": 99, "requests": 5, "answered": done}
                    for n in range(num_gateways)
                ],
                "processes": {f"worker-{n}": {"pid": 4_000_000 + n, **process} for n in range(num_workers)},
            }
        )
    )  # fmt: skip


def scene(num_workers: int = 2, num_gateways: int = 2, **changes) -> Scene:
    figures = compute_figures(stats(num_workers, num_gateways, 0), stats(num_workers, num_gateways, 2))
    rates = [(float(n), float(n), float(n)) for n in range(500)]
    picture = {"target": "http://127.0.0.1:8000", "interval_s": 1.0, "figures": figures, "rates": rates}
    return Scene(**{**picture, "has_keys": True, **changes})


def lines_of(scene: Scene, width: int, height: int | None) -> list[str]:
    console = Console(width=width, height=height or 25, force_terminal=True, color_system=None, markup=False)
    with console.capture() as captured:
        console.print(scene, end="", height=height)
    return captured.get().rstrip("\n").split("\n")


SIZES = [(40, 10), (60, 4), (60, 20), (80, 24), (100, 30), (119, 50), (120, 24), (200, 60)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(("num_workers", "num_gateways"), [(0, 1), (2, 2), (200, 64)])
def test_nothing_is_drawn_outside_the_terminal(width, height, num_workers, num_gateways):
    lines = lines_of(scene(num_workers, num_gateways, trouble="it does not answer" * 20), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("vecd 1.2")
    assert lines[2].startswith("it does not answer")


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24)])
def test_a_small_terminal_has_what_matters_most(width, height):
    text = "\n".join(lines_of(scene(), width, height))
    for found in ("a-model", "requests", "total", "queue", "oldest 250 ms", "errors", "stuck", "90 %"):
        assert found in text


def test_a_large_terminal_has_everything():
    text = "\n".join(lines_of(scene(), 140, 50))
    for found in (
        "384 dimensions · 256 tokens · mean · bfloat16 · fused",
        "2,000/s",  # of all statuses together
        "429 1,000/s (2,000)",
        "2,000 sequences retried",
        "padding 50 %",
        "2,000 of 2,048 rows in use (98 %)",
        "246 MB in 2 processes, which take 2.00 cores",
        "11 d 13 h",
        "away",
        "p99",
        "q quit",
    ):
        assert found in text, found


def test_more_workers_than_lines_are_counted():
    text = "\n".join(lines_of(scene(num_workers=50), 100, 40))
    assert "… and 38 more" in text
    assert "more" not in "\n".join(lines_of(scene(num_workers=50), 100, None))


def test_before_the_first_answer_it_says_what_it_waits_for():
    assert "waiting for the first answer" in lines_of(scene(figures=None), 80, 24)[2]
    lines = lines_of(scene(figures=None, trouble="no answer, trying again: connection refused"), 80, 24)
    assert "connection refused" in lines[2]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_none_of_it(encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    console = Console(file=file, width=130, height=40, force_terminal=True, color_system=None)
    console.print(scene(num_workers=50, target="http://näme"))  # a character that it lacks would be an error
    file.seek(0)
    text = file.read()
    assert "#########   90 %" in text
    assert text.split("\n")[2].endswith("####")
    assert "vecd 1.2  a-model | 384" in text


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (number(None), "–"), (number(0), "0"), (number(0.44), "0.4"), (number(12.5), "12.5"), (number(1234), "1,234"),
        (number(56_789), "56.8k"), (number(1_250_000), "1.2M"), (number(345e6), "345M"), (number(7e9), "7.0G"),
        (duration(None), "–"), (duration(0.00012), "0.12 ms"), (duration(0.0123), "12.3 ms"),
        (duration(0.25), "250 ms"), (duration(1.234), "1.23 s"), (duration(300.0), "300.0 s"),
        (age(59), "59 s"), (age(61), "1 min 01 s"), (age(3_720), "1 h 02 min"), (age(90_000), "1 d 1 h"),
        (size(None), "–"), (size(123e6), "123 MB"), (size(2.5e9), "2.5 GB"),
        (share(None), "–"), (share(0), "0 %"), (share(0.021), "2.1 %"), (share(1), "100 %"),
        (bar(None, 4), "    "), (bar(0.5, 4), "██  "), (bar(7, 2), "██"), (bar(0.0625, 2), "▏ "),
        (sparkline([], 3), "   "), (sparkline([0, 0], 3), " ▁▁"), (sparkline([1, 4, 8], 2), "▅█"),
        (sparkline([1.0], 0), ""), (sparkline([1.0], -5), ""),
    ],
)  # fmt: skip
def test_figures_in_words(written, expected):
    assert written == expected


def figures_of_models(num: int) -> dict:
    models = [
        {"model": f"organization/a-long-name-of-model-{n}", "state": "loading" if n else "ready", "kind": "rerank",
         "workers": 1, "num_workers": 2, "requests": 5, "queued_tokens": 1234, "loads": 3, "failed_loads": n,
         "tokens_per_s": 50.0, "memory_bytes": 123e6}
        for n in range(num)
    ]  # fmt: skip
    return {**(scene().figures or {}), "models": models}


def test_each_of_several_models_has_a_line():
    lines = lines_of(scene(figures=figures_of_models(2)), 140, 60)
    assert lines[0] == "vecd 1.2  2 models"
    [ready] = [line for line in lines if line.startswith("…-long-name-of-model-0")]
    [loading] = [line for line in lines if line.startswith("…-long-name-of-model-1")]
    assert ready.split()[1:] == ["ready", "50", "1,234", "5", "1", "of", "2", "123", "MB", "3", "rerank"]
    assert loading.split()[1:] == ["loading", "50", "1,234", "5", "1", "of", "2", "123", "MB", "3", "(1", "failed)",
                                   "rerank"]  # fmt: skip
    assert not any("of-model" in line for line in lines_of(scene(), 140, 60))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_many_models_are_not_drawn_outside_the_terminal(width, height):
    lines = lines_of(scene(figures=figures_of_models(100)), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_the_vector_cache_has_a_line_where_there_is_one():
    assert not any(line.startswith("cache") for line in lines_of(scene(), 100, 50))
    cache = {"max_bytes": 256 << 20, "bytes": 64 << 20, "hit_share": 0.875}
    figures = {**(scene().figures or {}), "vector_cache": cache}
    [line] = [line for line in lines_of(scene(figures=figures), 100, 50) if line.startswith("cache")]
    assert "found" in line
    assert "in use" in line
