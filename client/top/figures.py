"""The figures of `vecd top`: rates, percentiles and shares, from two answers of a server to `/stats`.

Owns the connection to `/stats`, which answers are compared, and the past rates. A server that was started again begins
anew. Draws nothing, and knows no clock but the server's. A figure without anything to divide by is None.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import accumulate
from typing import Any, TypeAlias

import orjson

from vecd.base.target import Target
from vecd.client.connection import (
    BadResponse,
    ServerResponse,
    TlsMismatch,
    connect,
    name_failure,
    or_mismatch,
    render_request,
)

NUM_REMEMBERED = 600
"""Answers; more than a terminal has columns."""
_CPU_WINDOW_S = 5.0
"""A server reads the processor time of its processes at most once a second, so shares of less would jump."""
_OWN_DIALECT = "vecd"
"""Requests of dashboards and probes, which are not counted as work."""
_MAX_CHARACTERS = 200

STAGES = ("parse", "tokenize", "queue", "compute", "encode", "total")
_WORK = ("inputs", "tokens", "padding_tokens", "batches", "sequences")
_FAULTS = ("refused", "expired", "retried", "stuck", "poisoned")

Stats: TypeAlias = Mapping[str, Any]
"""The body of `/stats`, and `answers`: the number of answers to requests for work by status."""
Figures: TypeAlias = Mapping[str, Any]
"""What `compute_figures` returns, and a line of --json contains."""


class NotStats(Exception):
    """Raised when an answer is not that of `/stats` of this version. The message says what is wrong with it."""


def read_stats(body: bytes) -> Stats:
    """Text loses the characters that could move a terminal's cursor. Raises NotStats."""
    try:
        stats: dict[str, Any] = _printable(orjson.loads(body))
        stats["answers"] = answers = Counter[int]()
        for entry in stats["requests"]:
            if entry["dialect"] != _OWN_DIALECT:
                answers[entry["status"]] += entry["count"]
        compute_figures(None, stats)  # which needs every field
    except orjson.JSONDecodeError as error:
        raise NotStats("no JSON") from error
    except KeyError as error:
        raise NotStats(f"no field {error}, which a server older than this vecd top does not send") from error
    except (AttributeError, IndexError, RecursionError, TypeError, ValueError) as error:
        raise NotStats("a field of a wrong type") from error
    return stats


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value[:_MAX_CHARACTERS])
    if isinstance(value, dict):
        return {_printable(name): _printable(each) for name, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value


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

    def rates(kind: str, one: Stats, *counts: str) -> dict[str, float | None]:
        old = entries[kind].get(one[kind], {})
        return {f"{count}_per_s": per_s(old.get(count), one[count]) for count in counts}

    def worker_figures(worker: Stats) -> Figures:
        busy = rates("worker", worker, "busy_s")["busy_s_per_s"]
        return {
            "worker": worker["worker"],
            "state": worker["state"],
            "num_restarts": max(0, worker["life"] - 1),
            # A batch counts when it is done, so a long one may be more than the time between two answers.
            "busy_share": min(1.0, busy) if busy is not None else None,
            **rates("worker", worker, "batches", "tokens"),
            "pid": worker["pid"],
            **usage(f"worker-{worker['worker']}"),
        }

    def gateway_figures(gateway: Stats) -> Figures:
        return {
            **_numbers(gateway, "gateway", "pid", "uptime_s", "connections", "requests"),
            **rates("gateway", gateway, "answered"),
            **usage(f"gateway-{gateway['gateway']}"),
        }

    def model_figures(model: Stats) -> Figures:
        return {
            **{name: model[name] for name in ("model", "state", "kind")},
            **_numbers(model, "workers", "num_workers", "requests", "queued_tokens", "loads", "failed_loads"),
            **rates("model", model, "tokens"),
            "memory_bytes": model["bytes"] or None,
        }

    entries = {kind: {one[kind]: one for one in before.get(f"{kind}s", ())} for kind in ("worker", "gateway", "model")}
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
        "queue": _numbers(now["queue"], "requests", "sequences", "tokens", "age_s"),
        "arena": _numbers(now["arena"], "rows", "rows_in_use"),
        "vector_cache": {
            **_numbers(found, "max_bytes", "bytes"),
            "hit_share": _share(hits, hits + found["misses"] - found_before["misses"]),
        },
        "batches": {
            "per_s": per_s(0, done["batches"]),
            "mean_sequences": _share(done["sequences"], done["batches"]),
            "mean_tokens": _share(done["tokens"], done["batches"]),
            "mean_fill": _share(fill["sum"] - fill_before["sum"], sum(fill["counts"]) - sum(fill_before["counts"])),
            "padding_share": _share(done["padding_tokens"], done["tokens"] + done["padding_tokens"]),
        },
        **({"models": [model_figures(model) for model in now["models"]]} if now.get("models") else {}),
        "workers": [worker_figures(worker) for worker in now["workers"]],
        "gateways": [gateway_figures(gateway) for gateway in now["gateways"]],
        "num_processes": len(processes),
        "memory_bytes": sum(map(_memory, processes.values())),
        "cpu_cores": sum(cpu_shares.values()) if cpu_shares else None,
    }


def _numbers(described: Stats, *names: str) -> dict[str, float]:
    return {name: +described[name] for name in names}  # + raises TypeError for what is no number


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _memory(process: Stats) -> float:
    num_bytes: float = process["proportional_bytes"] or process["resident_bytes"]
    return num_bytes


def _cpu_shares(before: Stats, now: Stats) -> dict[str, float]:
    if now["now_s"] <= before["now_s"]:
        return {}
    old = before["processes"]
    return {
        name: max(0.0, process["cpu_s"] - old[name]["cpu_s"]) / (now["now_s"] - before["now_s"])
        for name, process in now["processes"].items()
        if name in old and old[name]["pid"] == process["pid"]
    }


def _latency(stage: str, before: Stats, now: Stats) -> Figures:
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
        self._recent: deque[Stats] = deque(maxlen=NUM_REMEMBERED)

    def add(self, stats: Stats) -> Figures:
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
    return (
        len(supervisors) < 2
        and now["now_s"] > before["now_s"]
        and now["stage_bounds_s"] == before["stage_bounds_s"]
        and all(now[each].get(name, 0) >= num for each in ("totals", "answers") for name, num in before[each].items())
    )


# --- from the server -------------------------------------------------------------------------------------------

_TIMEOUT_S = 5.0
"""Time for a connection, and for a response. A supervisor replaces a gateway that hangs this long."""
_PATH = "/stats"
_REFUSALS = {
    401: "wants a key with the scope metrics: --api-key, or VECD_API_KEY",
    403: "has not given this key the scope metrics, which its figures need",
    404: f"has no {_PATH}: where --admin-port or --admin-uds are set, the figures are there; and servers older than "
    "this one have none",
}


class StatsRefused(Exception):
    """Raised when another request would bring the same response. The message says what is missing."""


class StatsUnavailable(Exception):
    """Raised when there is no response now. The message says why, in a word or two."""


def render_stats_request(target: Target, api_key: str | None) -> bytes:
    """Raises ValueError when the key cannot be sent."""
    return render_request(target, _PATH, api_key=api_key, user_agent="vecd-top")


async def fetch_stats(target: Target, api_key: str | None) -> Stats:
    """On a connection of its own. Raises StatsUnavailable or StatsRefused."""
    try:
        response = await or_mismatch(target, _exchange(target, render_stats_request(target, api_key)))
    except TlsMismatch as error:
        raise StatsRefused(f"{target}: {error}") from error
    except (OSError, BadResponse) as error:
        raise StatsUnavailable(name_failure(error)) from error
    if response.status == 401 and api_key is not None:
        raise StatsRefused(f"{target} does not know the key of --api-key")
    if response.status in _REFUSALS:
        raise StatsRefused(f"{target} {_REFUSALS[response.status]}")
    if response.status != 200:
        raise StatsUnavailable(f"status {response.status}")
    try:
        return read_stats(response.body)
    except NotStats as error:
        raise StatsRefused(f"{target}{_PATH} has not the figures of this version: {error}") from error


async def _exchange(target: Target, request: bytes) -> ServerResponse:
    with closing(await connect(target, _TIMEOUT_S)) as connection:
        return await connection.exchange(request, _TIMEOUT_S)
