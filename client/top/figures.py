"""The figures of `vecd top`: rates, percentiles and shares, from two answers of a server to `/stats`.

Owns the fields that an answer must have, how the figures are computed, which answer the last one is compared with, and
the past rates. A server that was started again begins anew. Draws nothing, requests nothing, and knows no clock but the
server's, which is in its answers. A figure without anything to divide by is None. Called by `vecd.client.top.command`;
drawn by `vecd.client.top.view`.
"""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import orjson

NUM_REMEMBERED = 600
"""Answers; more than a terminal has columns."""
_CPU_WINDOW_S = 5.0
"""A server reads the processor time of its processes at most once a second, so shares of less would jump."""
_OWN_DIALECT = "vecd"
"""Requests of dashboards and probes, which are not counted as work."""
_MAX_ITEMS = 4096
"""Length of a list: more workers, gateways or statuses than any server has."""
_MAX_CHARACTERS = 200

STAGES = ("parse", "tokenize", "queue", "compute", "encode", "total")
_WORK = ("inputs", "tokens", "padding_tokens", "batches", "sequences")
_FAULTS = ("refused", "expired", "retried", "stuck", "poisoned")

Stats: TypeAlias = Mapping[str, Any]
"""An answer as `read_stats` returns it: the fields of `_SHAPE`, and `answers`, the number of answers to requests for
work by status. All but `queue`, `arena`, the memory of `vector_cache`, `model` and `server` only grows while a server
lives."""
Figures: TypeAlias = Mapping[str, Any]
"""What `compute_figures` returns, and a line of --json contains."""


class NotStats(Exception):
    """Raised when an answer is not that of `/stats`. The message names the wrong field."""


# --- one answer ------------------------------------------------------------------------------------------------


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise NotStats(f"{name} is no number from 0")
    return value


def _whole(value: Any, name: str) -> int:
    return int(_number(value, name))


def _scalar(value: Any, _: str) -> Any:
    """Text with ? for what is not printable; None for what is neither text nor a number nor a boolean."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value[:_MAX_CHARACTERS])
    return value if isinstance(value, int | float | bool) else None


def _name(value: Any, name: str) -> str:
    return str(_scalar(value, name) or "?")


_CACHE = ("max_bytes", "bytes", "hits", "misses")


def _vector_cache(value: Any, name: str) -> Any:
    """Zeros for a server before it had one."""
    return _read(dict.fromkeys(_CACHE, 0) if value is None else value, dict.fromkeys(_CACHE, _number), name)


def _models(value: Any, name: str) -> Any:
    """Empty for a server of one model that is loaded all the time."""
    return _read([] if value is None else value, [_MODEL], name)


_ANY_NAME = "*"
_MODEL: Mapping[str, Any] = (
    {"model": _name, "state": _name, "kind": _name}
    | dict.fromkeys(("workers", "num_workers", "loads", "failed_loads"), _whole)
    | dict.fromkeys(("requests", "queued_tokens", "tokens", "bytes"), _number)
)
_SHAPE: Mapping[str, Any] = {
    "totals": dict.fromkeys(_WORK + _FAULTS, _number),
    "now_s": _number,
    "server": {"version": _name},
    "model": {_ANY_NAME: _scalar},
    "requests": [{"dialect": _name, "status": _whole, "count": _whole}],
    "stage_bounds_s": [_number],
    "stages": {stage: {"counts": [_number]} for stage in STAGES},
    "batch_fill": {"counts": [_number], "sum": _number},
    "queue": dict.fromkeys(("requests", "sequences", "tokens", "age_s"), _number),
    "arena": dict.fromkeys(("rows", "rows_in_use"), _number),
    "vector_cache": _vector_cache,
    "workers": [
        {"state": _name, "pid": lambda value, name: None if value is None else _whole(value, name)}
        | dict.fromkeys(("worker", "life"), _whole)
        | dict.fromkeys(("batches", "tokens", "busy_s"), _number)
        | dict.fromkeys(("dtype", "path"), _scalar)
    ],
    "gateways": [
        {"gateway": _whole, "pid": _whole} | dict.fromkeys(("uptime_s", "connections", "requests", "answered"), _number)
    ],
    "models": _models,
    "processes": {
        _ANY_NAME: {"pid": _whole} | dict.fromkeys(("cpu_s", "resident_bytes", "proportional_bytes"), _number)
    },
}
"""The fields that are needed; others may be there."""


def read_stats(body: bytes) -> Stats:
    """Nothing in `body` is trusted: a wrong field is reported by its name, and text loses characters that could move a
    terminal's cursor. Raises NotStats."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise NotStats("no JSON") from error
    if not isinstance(answer, dict):
        raise NotStats("no JSON object")
    stats = _read(answer, _SHAPE, "")
    bounds_s = stats["stage_bounds_s"]
    for stage, histogram in stats["stages"].items():  # the last count is of the values above all bounds
        if len(histogram["counts"]) != len(bounds_s) + 1 or bounds_s != sorted(bounds_s):
            raise NotStats(f"stages.{stage}.counts do not fit stage_bounds_s")
    answers: Counter[int] = Counter()
    for entry in stats["requests"]:
        if entry["dialect"] != _OWN_DIALECT:
            answers[entry["status"]] += entry["count"]
    return {**stats, "answers": answers}


def _read(value: Any, shape: Any, name: str) -> Any:
    """`value` with the fields of `shape` alone, each checked."""
    if isinstance(shape, dict):
        if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
            raise NotStats(f"{name} is no object")
        if _ANY_NAME in shape:
            shape = dict.fromkeys(value, shape[_ANY_NAME])
        names = {key: _scalar(key, "") for key in shape}
        return {
            names[key]: _read(value.get(key), each, f"{name}.{names[key]}".lstrip(".")) for key, each in shape.items()
        }
    if isinstance(shape, list):
        if not isinstance(value, list) or len(value) > _MAX_ITEMS:
            raise NotStats(f"{name} is no list")
        return [_read(each, shape[0], f"{name}.{index}") for index, each in enumerate(value)]
    return shape(value, name)


# --- two answers -----------------------------------------------------------------------------------------------


def compute_figures(before: Stats | None, now: Stats, cpu_before: Stats | None = None) -> Figures:
    """What happened between two answers of one life of a server (`is_same_life`), and its state now.

    `cpu_before`: the answer with which processor times are compared, if that is not `before`. Rates and shares are None
    where an answer or a process is the first of its kind.
    """
    elapsed_s = now["now_s"] - before["now_s"] if before is not None else None
    before = before or now  # nothing has grown, and no rate is known
    cpu_shares = _cpu_shares(cpu_before or before, now)
    processes = now["processes"]
    done = {name: now["totals"][name] - before["totals"][name] for name in _WORK}

    def per_s(earlier: float | None, later: float) -> float | None:
        return (later - earlier) / elapsed_s if earlier is not None and elapsed_s else None

    def usage(name: str) -> dict[str, float | None]:
        memory_bytes = _memory(processes[name]) if name in processes else None
        return {"memory_bytes": memory_bytes, "cpu_share": cpu_shares.get(name)}  # of one core

    def worker_figures(worker: Stats) -> Figures:
        old = workers_before.get(worker["worker"], {})
        busy = per_s(old.get("busy_s"), worker["busy_s"])
        return {
            "worker": worker["worker"],
            "state": worker["state"],
            "num_restarts": max(0, worker["life"] - 1),
            # A batch counts when it is done, so a long one may be more than the time between two answers.
            "busy_share": min(1.0, busy) if busy is not None else None,
            "batches_per_s": per_s(old.get("batches"), worker["batches"]),
            "tokens_per_s": per_s(old.get("tokens"), worker["tokens"]),
            "pid": worker["pid"],
            **usage(f"worker-{worker['worker']}"),
        }

    def gateway_figures(gateway: Stats) -> Figures:
        old = gateways_before.get(gateway["gateway"], {})
        return {
            **{name: gateway[name] for name in ("gateway", "pid", "uptime_s", "connections", "requests")},
            "answered_per_s": per_s(old.get("answered"), gateway["answered"]),
            **usage(f"gateway-{gateway['gateway']}"),
        }

    def model_figures(model: Stats) -> Figures:
        old = models_before.get(model["model"], {})
        return {
            **{name: model[name] for name in ("model", "state", "kind", "workers", "num_workers", "requests")},
            **{name: model[name] for name in ("queued_tokens", "loads", "failed_loads")},
            "tokens_per_s": per_s(old.get("tokens"), model["tokens"]),
            "memory_bytes": model["bytes"] or None,
        }

    workers_before = {worker["worker"]: worker for worker in before["workers"]}
    models_before = {model["model"]: model for model in before["models"]}
    gateways_before = {gateway["gateway"]: gateway for gateway in before["gateways"]}
    found_before, found = before["vector_cache"], now["vector_cache"]
    hits = found["hits"] - found_before["hits"]
    fill_before, fill = before["batch_fill"], now["batch_fill"]  # tokens ÷ room for tokens
    # How the workers compute; known once one of them has started.
    computing: Stats = next((worker for worker in now["workers"] if worker["path"]), {})
    return {
        "version": now["server"]["version"],
        "model": now["model"],
        "dtype": computing.get("dtype"),
        "path": computing.get("path"),
        "uptime_s": max((gateway["uptime_s"] for gateway in now["gateways"]), default=0.0),
        "elapsed_s": elapsed_s,
        "requests_per_s": per_s(before["answers"].total(), now["answers"].total()),
        "inputs_per_s": per_s(0, done["inputs"]),
        "tokens_per_s": per_s(0, done["tokens"]),
        "latencies": [_latency(stage, before, now) for stage in STAGES],
        "errors": [
            {"status": status, "per_s": per_s(before["answers"][status], num), "num": num}
            for status, num in sorted(now["answers"].items())
            if status >= 400
        ],
        "faults": {name: now["totals"][name] for name in _FAULTS if now["totals"][name]},
        "queue": now["queue"],
        "arena": now["arena"],
        "vector_cache": {
            "max_bytes": now["vector_cache"]["max_bytes"],
            "bytes": now["vector_cache"]["bytes"],
            "hit_share": _share(hits, hits + found["misses"] - found_before["misses"]),
        },
        "batches": {
            "per_s": per_s(0, done["batches"]),
            "mean_sequences": _share(done["sequences"], done["batches"]),
            "mean_tokens": _share(done["tokens"], done["batches"]),
            "mean_fill": _share(fill["sum"] - fill_before["sum"], sum(fill["counts"]) - sum(fill_before["counts"])),
            "padding_share": _share(done["padding_tokens"], done["tokens"] + done["padding_tokens"]),
        },
        **({"models": [model_figures(model) for model in now["models"]]} if now["models"] else {}),
        "workers": [worker_figures(worker) for worker in now["workers"]],
        "gateways": [gateway_figures(gateway) for gateway in now["gateways"]],
        "num_processes": len(processes),
        "memory_bytes": sum(map(_memory, processes.values())),
        "cpu_cores": sum(cpu_shares.values()) if cpu_shares else None,
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _memory(process: Stats) -> float:
    """Shared pages count once, where the kernel says which pages are shared."""
    num_bytes: float = process["proportional_bytes"] or process["resident_bytes"]
    return num_bytes


def _cpu_shares(before: Stats, now: Stats) -> dict[str, float]:
    """Shares of one core, by process, for those that were already there under the same id."""
    if now["now_s"] <= before["now_s"]:
        return {}
    old = before["processes"]
    return {
        name: max(0.0, process["cpu_s"] - old[name]["cpu_s"]) / (now["now_s"] - before["now_s"])
        for name, process in now["processes"].items()
        if name in old and old[name]["pid"] == process["pid"]
    }


def _latency(stage: str, before: Stats, now: Stats) -> Figures:
    """Of the requests that finished one stage, or all of them, in between."""
    pairs = zip(before["stages"][stage]["counts"], now["stages"][stage]["counts"], strict=True)
    counts = [later - earlier for earlier, later in pairs]
    p50_s, p90_s, p99_s = (percentile(now["stage_bounds_s"], counts, share) for share in (0.5, 0.9, 0.99))
    return {"stage": stage, "num": sum(counts), "p50_s": p50_s, "p90_s": p90_s, "p99_s": p99_s}


def percentile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value that `share` of all values are below, or None without values.

    Values are taken to lie evenly in their bucket, as by histogram_quantile of Prometheus. Above the last bound the
    result is that bound.
    """
    total = sum(counts)
    if total <= 0:
        return None
    sums = list(accumulate(counts))
    bucket = bisect_left(sums, share * total)
    if bucket >= len(bounds):
        return bounds[-1]
    below = sums[bucket - 1] if bucket else 0
    lower = bounds[bucket - 1] if bucket else 0.0
    return lower + (bounds[bucket] - lower) * (share * total - below) / counts[bucket]


# --- from answer to answer -------------------------------------------------------------------------------------


class History:
    """`add` each answer, in order."""

    def __init__(self) -> None:
        self.rates: deque[tuple[float, float, float]] = deque(maxlen=NUM_REMEMBERED)
        """Requests, inputs and tokens a second of the last answers, oldest first."""
        self.num_restarts = 0
        """Of the server, as far as they were seen."""
        self._recent: deque[Stats] = deque(maxlen=NUM_REMEMBERED)
        """The answers of the last seconds, oldest first."""

    def add(self, stats: Stats) -> Figures:
        """What has happened since the last answer."""
        if self._recent and not is_same_life(self._recent[-1], stats):
            self.num_restarts += 1
            self._recent.clear()
            self.rates.clear()
        while len(self._recent) > 1 and stats["now_s"] - self._recent[0]["now_s"] > _CPU_WINDOW_S:
            self._recent.popleft()
        first, last = (self._recent[0], self._recent[-1]) if self._recent else (None, None)
        figures = compute_figures(last, stats, first)
        self._recent.append(stats)
        if figures["elapsed_s"] is not None:
            self.rates.append((figures["requests_per_s"], figures["inputs_per_s"], figures["tokens_per_s"]))
        return figures


def is_same_life(before: Stats, now: Stats) -> bool:
    """Whether the server has not been started again: no count that only grows has become smaller."""
    supervisors = {stats["processes"].get("supervisor", {}).get("pid") for stats in (before, now)} - {None}
    counts = _growing(now)
    return (
        len(supervisors) < 2
        and now["now_s"] > before["now_s"]
        and now["stage_bounds_s"] == before["stage_bounds_s"]
        and all(counts.get(name, 0) >= count for name, count in _growing(before).items())
    )


def _growing(stats: Stats) -> dict[Any, float]:
    """All counts of the whole server, each under a name of its own."""
    buckets = {
        (stage, bucket): count for stage in STAGES for bucket, count in enumerate(stats["stages"][stage]["counts"])
    }
    return {**stats["totals"], **stats["answers"], **buckets}
