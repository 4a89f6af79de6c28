"""The figures of `vecd top`, from two answers made by hand."""

import copy

import orjson
import pytest

from vecd.client.top.figures import (
    NUM_REMEMBERED,
    STAGES,
    History,
    NotStats,
    Stats,
    compute_figures,
    is_same_life,
    percentile,
    read_stats,
)

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
    return read_stats(orjson.dumps(changed))


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
    figures = compute_figures(read(answer()), read(later()))
    assert (figures["requests_per_s"], figures["inputs_per_s"], figures["tokens_per_s"]) == (10, 20, 450)
    batches = figures["batches"]
    assert (batches["per_s"], batches["mean_sequences"], batches["mean_tokens"]) == (5, 4, 90)
    assert batches["padding_share"] == 0.1
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


def test_hits_of_the_vector_cache_are_those_of_the_interval():
    before, after = answer(), later()
    before["vector_cache"] |= {"hits": 10, "misses": 10}
    after["vector_cache"] |= {"hits": 16, "misses": 12, "bytes": 500}
    figures = compute_figures(read(before), read(after))
    assert figures["vector_cache"] == {"max_bytes": 1000, "bytes": 500, "hit_share": 0.75}
    del before["vector_cache"], after["vector_cache"]
    figures = compute_figures(read(before), read(after))
    assert figures["vector_cache"] == {"max_bytes": 0, "bytes": 0, "hit_share": None}


def test_where_nothing_happened_there_is_no_percentile_and_no_mean():
    figures = compute_figures(read(later(2.0)), read(later(4.0)))
    assert figures["requests_per_s"] == figures["batches"]["per_s"] == figures["workers"][0]["busy_share"] == 0
    assert figures["batches"]["mean_tokens"] is figures["batches"]["padding_share"] is None
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
    with pytest.raises(NotStats, match=r"models\.0\.loads"):
        read(answer() | {"models": [model("a", loads=-1)]})


def test_programs_find_every_figure_under_its_name():
    for before in (None, read(answer())):
        figures = compute_figures(before, read(later()))
        assert list(figures) == KEYS.split()
        assert list(figures["batches"]) == ["per_s", "mean_sequences", "mean_tokens", "mean_fill", "padding_share"]
        assert {name: list(figures[name][0]) for name in KEYS_WITHIN} == {
            name: keys.split() for name, keys in KEYS_WITHIN.items()
        }


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([10, 0, 0, 0], 0.5, 0.0005),  # halfway between 0 and the first bound
        ([10, 0, 0, 0], 1.0, 0.001),
        ([0, 10, 0, 0], 0.5, 0.0055),
        ([10, 10, 0, 0], 0.5, 0.001),
        ([10, 10, 0, 0], 0.75, 0.0055),
        ([0, 0, 0, 3], 0.5, 0.1),  # above all bounds: nothing is known but that
        ([99, 0, 0, 1], 0.99, 0.001),
        ([0, 0, 0, 0], 0.5, None),
    ],
)
def test_percentiles_are_interpolated_within_their_bucket(counts, share, expected):
    assert percentile(tuple(BOUNDS), counts, share) == (pytest.approx(expected) if expected is not None else None)


def test_percentiles_are_of_the_requests_in_between_alone():
    before, after = later(), later(4.0)
    after["stages"]["queue"]["counts"] = [4, 10, 0, 10]
    figures = compute_figures(read(before), read(after))
    queue = next(latency for latency in figures["latencies"] if latency["stage"] == "queue")
    assert queue["num"] == 4
    assert queue["p50_s"] == pytest.approx(0.0005)


def test_a_long_batch_makes_nobody_busier_than_busy():
    after = later()
    after["workers"][0]["busy_s"] = 30.0
    assert compute_figures(read(answer()), read(after))["workers"][0]["busy_share"] == 1.0


def test_whoever_is_new_has_no_rates_yet():
    after = later()
    after["workers"].append({**after["workers"][0], "worker": 1, "life": 3, "pid": None})
    after["processes"]["worker-0"]["pid"] = 99  # another life, whose processor time began at 0
    figures = compute_figures(read(answer()), read(after))
    old, new = figures["workers"]
    assert (old["num_restarts"], new["num_restarts"]) == (0, 2)
    assert new["busy_share"] is new["memory_bytes"] is old["cpu_share"] is None


def test_fill_is_that_of_the_batches_in_between():
    before, after = answer(), later()
    before["batch_fill"] = {"bounds": [0.5, 1.0], "counts": [4, 0, 0], "sum": 1.0}
    after["batch_fill"] = {"bounds": [0.5, 1.0], "counts": [4, 2, 0], "sum": 2.5}
    assert compute_figures(read(before), read(after))["batches"]["mean_fill"] == 0.75
    assert compute_figures(read(answer()), read(later()))["batches"]["mean_fill"] is None


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
        gone_back(stages__parse={"counts": [0, 9, 9, 10], "sum_s": 9.0}),
        gone_back(now_s=101.0),
        gone_back(processes__supervisor={"pid": 77, "cpu_s": 0, "resident_bytes": 1, "proportional_bytes": 1}),
    ],
    ids=["all", "total", "status", "bucket", "clock", "supervisor"],
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
    assert (list(history.rates), history.num_restarts) == ([], 1)
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


def broken(change) -> bytes:
    changed = copy.deepcopy(answer())
    change(changed)
    return orjson.dumps(changed)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"<html>", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no JSON object"),
        (b"{}", "totals"),
        (broken(lambda a: a.pop("now_s")), "now_s"),
        (broken(lambda a: a["totals"].update(tokens="many")), "tokens"),
        (broken(lambda a: a["totals"].update(tokens=-1)), "tokens"),
        (broken(lambda a: a["totals"].update(tokens=True)), "tokens"),
        (broken(lambda a: a["stages"]["queue"].update(counts=[1, 2])), "stages.queue.counts"),
        (broken(lambda a: a.update(stage_bounds_s=[3, 2, 1])), "bounds"),
        (broken(lambda a: a["stages"].pop("total")), "total"),
        (broken(lambda a: a.update(workers=[1])), "workers"),
        (broken(lambda a: a.update(workers=a["workers"] * 5000)), "workers"),
        (broken(lambda a: a["workers"][0].pop("busy_s")), "busy_s"),
        (broken(lambda a: a["requests"][0].update(status=None, dialect="openai")), "status"),
        (broken(lambda a: a.update(queue=None)), "queue"),
        (broken(lambda a: a.pop("batch_fill")), "batch_fill"),
    ],
)
def test_what_is_no_answer_is_told_by_its_field(body, field):
    with pytest.raises(NotStats, match=field):
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
