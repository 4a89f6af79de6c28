"""`vecd top`: its figures, from two answers made by hand, and how they look in terminals of several sizes."""

import copy

import orjson
import pytest
from rich.console import Console

from vecd.client.exchanges import VecdError
from vecd.client.top.figures import (
    NUM_REMEMBERED,
    STAGES,
    History,
    Stats,
    compute_figures,
    is_same_life,
    percentile,
    read_stats,
)
from vecd.client.top.view import Scene, sparkline, written

BOUNDS = [0.001, 0.01, 0.1]


def answer(now_s: float = 100.0) -> dict:
    """Of a server that has done nothing yet."""
    process = {"cpu_s": 1.0, "resident_bytes": 100, "proportional_bytes": 60}
    return {
        "now_s": now_s,
        "model": {"id": "m", "dimensions": 384, "max_tokens": 256, "pooling": "mean", "normalized": True},
        "server": {"version": "1.2", "num_gateways": 1, "gateway": 0},
        "requests": [{"route": "/stats", "dialect": "vecd", "status": 200, "count": 7}],
        "totals": dict.fromkeys(
            ("inputs", "input_tokens", "sequences", "tokens", "padding_tokens", "batches", "compute_s",
             "refused", "expired", "retried", "stuck", "poisoned"), 0
        ),
        "batch_fill": {"bounds": [0.5, 1.0], "counts": [0, 0, 0], "sum": 0.0},
        "stage_bounds_s": BOUNDS,
        "stages": {stage: {"counts": [0, 0, 0, 0], "sum_s": 0.0} for stage in STAGES},
        "queue": {"requests": 0, "sequences": 0, "tokens": 0, "age_s": 0.0},
        "arena": {"rows": 1000, "rows_in_use": 0},
        "vector_cache": {"max_bytes": 1000, "bytes": 0, "hits": 0, "misses": 0},
        "workers": [
            {"worker": 0, "life": 1, "state": "ready", "batches": 0, "sequences": 0, "tokens": 0, "busy_s": 0.0,
             "tokens_per_s": 5, "pid": 12, "dtype": "float32", "path": "fused"},
        ],
        "gateways": [{"gateway": 0, "pid": 11, "uptime_s": 50.0, "connections": 1, "requests": 0, "answered": 7}],
        "batches": [],
        "processes": {
            "supervisor": {"pid": 10, **process},
            "gateway-0": {"pid": 11, **process},
            "worker-0": {"pid": 12, **process},
        },
    }  # fmt: skip


def read(changed: dict) -> Stats:
    return read_stats(orjson.loads(orjson.dumps(changed)))


def later(seconds: float = 2.0) -> dict:
    """After so long, with 20 requests answered, 10 in the second bucket of each stage and 10 above all."""
    after = answer(100.0 + seconds)
    after["requests"] += [
        {"route": "/v1/embeddings", "dialect": "openai", "status": 200, "count": 16},
        {"route": "/v1/embeddings", "dialect": "openai", "status": 429, "count": 3},
        {"route": "/embed", "dialect": "tei", "status": 429, "count": 1},
    ]
    after["totals"] |= {
        "inputs": 40,
        "tokens": 900,
        "padding_tokens": 100,
        "batches": 10,
        "sequences": 40,
        "refused": 4,
    }
    for stage in after["stages"].values():
        stage.update(counts=[0, 10, 0, 10], sum_s=9.0)
    after["workers"][0] |= {"batches": 10, "tokens": 900, "busy_s": 1.5}
    after["processes"]["worker-0"]["cpu_s"] = 2.0
    return after


def test_rates_and_shares_are_of_what_came_in_between():
    before, after = answer(), later()
    before["vector_cache"] |= {"hits": 10, "misses": 10}
    after["vector_cache"] |= {"hits": 16, "misses": 12, "bytes": 500}
    before["batch_fill"] |= {"counts": [4, 0, 0], "sum": 1.0}
    after["batch_fill"] |= {"counts": [4, 2, 0], "sum": 2.5}
    before["stages"]["queue"]["counts"] = [0, 10, 0, 10]
    after["stages"]["queue"]["counts"] = [4, 10, 0, 10]
    figures = compute_figures(read(before), read(after))
    assert (figures["requests_per_s"], figures["inputs_per_s"], figures["tokens_per_s"]) == (10, 20, 450)
    batches = figures["batches"]
    assert (batches["per_s"], batches["mean_sequences"], batches["mean_tokens"]) == (5, 4, 90)
    assert (batches["padding_share"], batches["mean_fill"]) == (0.1, 0.75)
    assert figures["vector_cache"] == {"max_bytes": 1000, "bytes": 500, "hit_share": 0.75}
    queue = next(latency for latency in figures["latencies"] if latency["stage"] == "queue")
    assert (queue["num"], queue["p50_s"]) == (4, pytest.approx(0.0005))
    [worker] = figures["workers"]
    assert (worker["busy_share"], worker["batches_per_s"], worker["tokens_per_s"]) == (0.75, 5, 450)
    assert worker["cpu_share"] == 0.5
    assert figures["errors"] == [{"status": 429, "per_s": 2, "num": 4}]
    assert figures["faults"] == {"refused": 4}
    assert (figures["memory_bytes"], figures["num_processes"], figures["cpu_cores"]) == (180, 3, 0.5)


def test_the_first_answer_has_levels_and_no_rates():
    figures = compute_figures(None, read(later()))
    assert figures["elapsed_s"] is figures["requests_per_s"] is figures["batches"]["per_s"] is None
    assert figures["workers"][0]["busy_share"] is None
    assert {latency["p50_s"] for latency in figures["latencies"]} == {None}
    assert figures["cpu_cores"] is None
    assert figures["errors"] == [{"status": 429, "per_s": None, "num": 4}]
    assert figures["memory_bytes"] == 180


def test_where_nothing_happened_there_is_no_percentile_and_no_mean():
    figures = compute_figures(read(later(2.0)), read(later(4.0)))
    assert figures["requests_per_s"] == figures["batches"]["per_s"] == figures["workers"][0]["busy_share"] == 0
    batches = figures["batches"]
    assert batches["mean_tokens"] is batches["padding_share"] is batches["mean_fill"] is None
    assert figures["latencies"][-1]["p99_s"] is None


KEYS = """
    version model dtype path uptime_s elapsed_s requests_per_s inputs_per_s tokens_per_s latencies errors faults queue
    arena vector_cache batches workers gateways num_processes memory_bytes cpu_cores
"""
KEYS_WITHIN = {
    "latencies": "stage num p50_s p90_s p99_s",
    "workers": "worker state num_restarts busy_share batches_per_s tokens_per_s pid memory_bytes cpu_share",
    "gateways": "gateway pid uptime_s connections requests answered_per_s memory_bytes cpu_share",
}


def model(name: str, **changes) -> dict:
    return {
        "model": name, "state": "ready", "reason": "", "kind": "dense", "workers": 1, "num_workers": 1, "requests": 0,
        "queued_tokens": 0, "in_flight_tokens": 0, "tokens_per_s": 9, "tokens": 0, "bytes": 0, "load_s": 0.0,
        "wait_s": 0.0, "loads": 0, "failed_loads": 0, "unloads": {}, **changes,
    }  # fmt: skip


def test_each_of_several_models_has_its_figures():
    before = answer() | {"models": [model("a", tokens=50)]}
    state = {"state": "loading", "workers": 0, "requests": 3, "queued_tokens": 40}
    after = later(2.0) | {"models": [model("a", tokens=250, bytes=7), model("org/b\x1b[2J", loads=2, **state)]}
    first, other = compute_figures(read(before), read(after))["models"]
    assert first == {
        "model": "a", "state": "ready", "kind": "dense", "workers": 1, "num_workers": 1, "requests": 0,
        "queued_tokens": 0, "loads": 0, "failed_loads": 0, "tokens_per_s": 100.0, "memory_bytes": 7,
    }  # fmt: skip
    assert (other["model"], other["tokens_per_s"], other["memory_bytes"]) == ("org/b?[2J", None, None)
    assert {name: other[name] for name in state} == state
    assert "models" not in compute_figures(read(answer()), read(later()))


def test_programs_find_every_figure_under_its_name():
    for before in (None, read(answer())):
        figures = compute_figures(before, read(later()))
        assert figures.keys() == set(KEYS.split())
        assert list(figures["batches"]) == ["per_s", "mean_sequences", "mean_tokens", "mean_fill", "padding_share"]
        assert {name: figures[name][0].keys() for name in KEYS_WITHIN} == {
            name: set(keys.split()) for name, keys in KEYS_WITHIN.items()
        }


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([10, 0, 0, 0], 0.5, 0.0005),  # halfway between 0 and the first bound
        ([0, 10, 0, 0], 0.5, 0.0055),
        ([10, 10, 0, 0], 0.5, 0.001),
        ([0, 0, 0, 3], 0.5, 0.1),  # above all bounds: nothing is known but that
        ([99, 0, 0, 1], 0.99, 0.001),
        ([0, 0, 0, 0], 0.5, None),
    ],
)
def test_percentiles_are_interpolated_within_their_bucket(counts, share, expected):
    assert percentile(tuple(BOUNDS), counts, share) == (pytest.approx(expected) if expected is not None else None)


def test_whoever_is_new_has_no_rates_yet():
    after = later()
    after["workers"][0]["busy_s"] = 30.0  # a batch that was longer than the interval
    after["workers"].append({**after["workers"][0], "worker": 1, "life": 3, "pid": None})
    after["processes"]["worker-0"]["pid"] = 99  # another life, whose processor time began at 0
    figures = compute_figures(read(answer()), read(after))
    old, new = figures["workers"]
    assert (old["num_restarts"], new["num_restarts"], old["busy_share"]) == (0, 2, 1.0)
    assert new["busy_share"] is new["memory_bytes"] is old["cpu_share"] is None


# --- restarts --------------------------------------------------------------------------------------------------


def gone_back(**changes: object) -> dict:
    after = later(4.0)
    for path, value in changes.items():
        *parents, name = path.split("__")
        found = after
        for parent in parents:
            found = found[parent]
        found[name] = value
    return after


@pytest.mark.parametrize(
    "after",
    [
        answer(104.0),
        gone_back(totals__tokens=899),
        gone_back(requests=[]),
        gone_back(now_s=101.0),
        gone_back(processes__supervisor={"pid": 77, "cpu_s": 0, "resident_bytes": 1, "proportional_bytes": 1}),
    ],
    ids=["all", "total", "status", "clock", "supervisor"],
)
def test_a_server_that_began_again_is_noticed(after):
    assert not is_same_life(read(later()), read(after))
    assert is_same_life(read(later()), read(later(4.0)))


def test_after_a_restart_everything_starts_anew():
    history = History()
    history.add(read(answer()))
    history.add(read(later()))
    assert list(history.rates) == [(10, 20, 450)]
    figures = history.add(read(answer(104.0)))
    assert figures["requests_per_s"] is figures["cpu_cores"] is None
    assert list(history.rates) == []
    assert history.add(read(answer(105.0)))["requests_per_s"] == 0


def test_processor_time_is_of_the_last_seconds():
    """A server reads it once a second at most: two answers may have the same."""
    history = History()
    for second in range(20):
        after = answer(100.0 + second)
        after["processes"]["worker-0"]["cpu_s"] = 1.0 + second // 2 * 2 * 0.25
        figures = history.add(read(after))
    assert figures["workers"][0]["cpu_share"] == pytest.approx(0.25, abs=0.06)


def test_what_is_remembered_is_bounded():
    history = History()
    for second in range(NUM_REMEMBERED + 10):
        history.add(read(answer(100.0 + second / 100)))
    assert len(history.rates) == NUM_REMEMBERED


# --- what is no such answer ------------------------------------------------------------------------------------


def broken(change) -> dict:
    changed = copy.deepcopy(answer())
    change(changed)
    return changed


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "wrong type"),
        ({}, "no field 'requests'"),
        (broken(lambda a: a.pop("now_s")), "now_s"),
        (broken(lambda a: a["totals"].update(tokens="many")), "wrong type"),
        (broken(lambda a: a["workers"][0].pop("busy_s")), "busy_s"),
        (broken(lambda a: a["requests"][0].update(status=None, dialect="openai")), "wrong type"),
        (broken(lambda a: a["stages"]["queue"].update(counts=None)), "wrong type"),
        (broken(lambda a: a.pop("batch_fill")), "batch_fill.*older than this vecd top"),
    ],
)
def test_what_is_no_answer_is_told_in_one_line(body, words):
    with pytest.raises(VecdError, match=words):
        read_stats(body)


def test_nothing_that_a_server_says_reaches_the_terminal_s_controls():
    changed = answer()
    changed["model"]["id"] = "\x1b[2Jevil\r\n\u202e" + "x" * 10_000
    changed["workers"][0]["state"] = "\x07ready"
    changed["processes"]["\x1b[Jworker"] = changed["processes"]["worker-0"]
    changed["unheard of"] = {"more": []}
    stats = read(changed)
    assert stats["model"]["id"].startswith("?[2Jevil???xxx")
    assert len(stats["model"]["id"]) <= 200
    assert stats["workers"][0]["state"] == "?ready"
    assert "?[Jworker" in stats["processes"]


# --- the picture -------------------------------------------------------------------------------------------------


def busy(num_workers: int, num_gateways: int, seconds: int) -> Stats:
    """Of a server with much to do, `seconds` after it began."""
    done, at = seconds * 1000, answer(100.0 + seconds)
    process = {"cpu_s": 1.0 + seconds, "resident_bytes": 3e8, "proportional_bytes": 123e6}
    at["model"]["id"], [worker], [gateway] = "a-model", at["workers"], at["gateways"]
    worker |= {"life": 3, "state": "stuck", "batches": done, "tokens": done, "busy_s": seconds * 0.9}
    gateway |= {"uptime_s": 1e6, "connections": 99, "requests": 5, "answered": done}
    at["totals"] |= dict.fromkeys(("inputs", "tokens", "padding_tokens", "batches", "sequences", "retried"), done)
    at["queue"] |= {"requests": 1234567, "age_s": 0.25}
    return read(
        at
        | {
            "requests": [{"dialect": "openai", "status": status, "count": done} for status in (200, 429)],
            "arena": {"rows": 2048, "rows_in_use": 2000},
            "vector_cache": dict.fromkeys(("max_bytes", "bytes", "hits", "misses"), 0),
            "workers": [{**worker, "worker": n, "pid": 4_000_000 + n} for n in range(num_workers)],
            "gateways": [{**gateway, "gateway": n, "pid": n} for n in range(num_gateways)],
            "processes": {f"worker-{n}": {"pid": 4_000_000 + n, **process} for n in range(num_workers)},
        }
    )


def scene(num_workers: int = 2, num_gateways: int = 2, **changes) -> Scene:
    figures = compute_figures(busy(num_workers, num_gateways, 0), busy(num_workers, num_gateways, 2))
    rates = [(float(n), float(n), float(n)) for n in range(500)]
    picture = {"target": "http://127.0.0.1:8000", "interval_s": 1.0, "figures": figures, "rates": rates}
    return Scene(**{**picture, "has_keys": True, **changes})


def lines_of(scene: Scene, width: int, height: int | None) -> list[str]:
    console = Console(width=width, height=height or 25, force_terminal=True, color_system=None, markup=False)
    with console.capture() as captured:
        console.print(scene, end="", height=height)
    return captured.get().rstrip("\n").split("\n")


@pytest.mark.parametrize(("width", "height"), [(40, 10), (60, 4), (60, 20), (80, 24), (119, 50), (120, 24), (200, 60)])
@pytest.mark.parametrize(("num_workers", "num_gateways", "num_models"), [(0, 1, 1), (200, 64, 1), (2, 2, 100)])
def test_nothing_is_drawn_outside_the_terminal(width, height, num_workers, num_gateways, num_models):
    changes = {"figures": figures_of_models(num_models)} if num_models > 1 else {}
    lines = lines_of(scene(num_workers, num_gateways, trouble="it does not answer" * 20, **changes), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("vecd 1.2")
    assert lines[2].startswith("it does not answer")


def test_a_large_terminal_has_everything():
    text = "\n".join(lines_of(scene(), 140, 50))
    for found in (
        "384 dimensions · 256 tokens · mean · float32 · fused",
        "2,000/s",  # of all statuses together
        "429 1,000/s (2,000)",
        "2,000 sequences retried",
        "padding 50.0%",
        "2,000 of 2,048 rows in use",
        "246 MB in 2 processes, which take 2 cores",
        "█████████   90.0%",
        "11 days, 13:46:40",
        "2 workers",
        "p99",
        "q quit",
    ):
        assert found in text, found


def test_a_small_terminal_shows_the_most_important_lines_and_columns():
    lines = lines_of(scene(40, 1), 60, 12)
    assert [line.split()[0] for line in lines[2:]] == [
        *("requests", "inputs", "tokens", "stage", "total", "queue", "errors", "40", "0", "1"),
    ]
    assert lines[9].split()[1:] == ["workers", "state", "busy", "tokens/s", "restarts"]


def test_before_the_first_answer_it_says_what_it_waits_for():
    assert "waiting for the first answer" in lines_of(scene(figures=None), 80, 24)[2]
    lines = lines_of(scene(figures=None, trouble="no answer, trying again: connection refused"), 80, 24)
    assert "connection refused" in lines[2]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tokens_per_s", None, "–"), ("tokens_per_s", 0.444, "0.44"), ("tokens_per_s", 12, "12"),
        ("tokens_per_s", 1234.5, "1,234"), ("age_s", 0.00012, "0.12 ms"), ("p99_s", 1.234, "1,234 ms"),
        ("uptime_s", 61.5, "0:01:01"), ("uptime_s", 90_000, "1 day, 1:00:00"), ("memory_bytes", 123e6, "123 MB"),
        ("busy_share", 0.021, "2.1%"), ("mean_fill", 1, "100.0%"), ("pid", 25292, "25292"), ("state", "ready", "ready"),
    ],
)  # fmt: skip
def test_figures_are_written_by_the_unit_in_their_name(name, value, expected):
    assert written(name, value) == expected


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [([], 3, "   "), ([0, 0], 3, " ▁▁"), ([1, 4, 8], 2, "▅█"), ([1.0], 0, ""), ([1.0], -5, "")],
)
def test_a_trend_has_a_block_for_each_value(values, width, expected):
    assert sparkline(values, width) == expected


def figures_of_models(num: int) -> dict:
    models = [
        {"model": f"organization/a-long-name-of-model-{n}", "state": "loading" if n else "ready", "kind": "rerank",
         "workers": 1, "num_workers": 2, "requests": 5, "queued_tokens": 1234, "loads": 3, "failed_loads": n,
         "tokens_per_s": 50.0, "memory_bytes": 123e6}
        for n in range(num)
    ]  # fmt: skip
    return {**(scene().figures or {}), "models": models}
