"""The figures of `vecd top`: rates, percentiles and shares, from two answers of a server to `/stats`.

Owns the request for `/stats`, which answers are compared, and the past rates. A server that was started again begins
anew. Draws nothing, and knows no clock but the server's. A figure without anything to divide by is None.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from vecd.client.aio import AsyncClient
from vecd.client.exchanges import Piece, Reaction, Timeout, VecdError

NUM_REMEMBERED = 600
"""Answers; more than a terminal has columns."""
_CPU_WINDOW_S = 5.0
"""A server reads the processor time of its processes at most once a second, so shares of less would jump."""
_OWN_DIALECT = "vecd"
"""Requests of dashboards and probes, which are not counted as work."""
_MAX_CHARACTERS = 200

STAGES = ("parse", "tokenize", "queue", "compute", "encode", "total")
_ENTRIES = {
    "model": (
        ("model", "state", "kind", "workers", "num_workers", "requests", "queued_tokens", "loads", "failed_loads"),
        ("tokens",),
    ),
    "worker": (("worker", "state", "pid"), ("batches", "tokens")),
    "gateway": (("gateway", "pid", "uptime_s", "connections", "requests"), ("answered",)),
}
"""By what an entry is of: its levels, and its counts, of which the rates are figures."""
_FAULTS = ("refused", "expired", "retried", "stuck", "poisoned")

Stats: TypeAlias = Mapping[str, Any]
"""The body of `/stats`, with workers, gateways and models by their names, and `answers`: the number of answers to
requests for work by status."""
Figures: TypeAlias = Mapping[str, Any]
"""What `compute_figures` returns, and a line of --json contains."""


def read_stats(body: Any) -> Stats:
    """Text loses the characters that could move a terminal's cursor. Raises VecdError for what is no such body."""
    try:
        stats: dict[str, Any] = _printable(body)
        for kind in _ENTRIES:
            stats[f"{kind}s"] = {entry[kind]: entry for entry in stats.get(f"{kind}s", ())}
        stats["answers"] = answers = Counter[int]()
        for entry in stats["requests"]:
            if entry["dialect"] != _OWN_DIALECT:
                answers[entry["status"]] += entry["count"]
        compute_figures(None, stats)  # which needs every field
    except KeyError as error:
        why = f"no field {error}, which a server older than this vecd top does not send"
    except (AttributeError, IndexError, RecursionError, TypeError, ValueError):
        why = "a field of a wrong type"
    else:
        return stats
    raise VecdError(f"the server has not the figures of this version: {why}")


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
    grown: Stats = _growth(before, now)
    totals, cache, fill = grown["totals"], grown["vector_cache"], grown["batch_fill"]
    answers = now["answers"] - before["answers"]
    processes, cpu_shares = now["processes"], _cpu_shares(cpu_before or before, now)

    def per_s(count: float | None) -> float | None:
        return count / elapsed_s if count is not None and elapsed_s else None

    def rates(entry: Stats, *counts: str) -> dict[str, float | None]:
        return {f"{count}_per_s": per_s(entry[count]) for count in counts}

    def entry_figures(kind: str, name: Any, entry: Stats) -> Figures:
        levels, counts = _ENTRIES[kind]
        entry_grown, process = grown[f"{kind}s"][name], f"{kind}-{name}"
        figures = _part(entry, *levels) | rates(entry_grown, *counts)
        if kind == "model":
            return figures | {"memory_bytes": entry["bytes"] or None}
        figures["memory_bytes"] = _memory(processes[process]) if process in processes else None
        figures["cpu_share"] = cpu_shares.get(process)  # of one core
        if kind == "worker":
            # A batch counts when it is done, so a long one may be more than the time between two answers.
            busy = per_s(entry_grown["busy_s"])
            figures["busy_share"] = min(1.0, busy) if busy is not None else None
            figures["num_restarts"] = max(0, entry["life"] - 1)
        return figures

    # How the workers compute; known once one of them has started.
    computing: Stats = next((worker for worker in now["workers"].values() if worker["path"]), {})
    return {
        "version": now["server"]["version"],
        "model": now["model"],
        "dtype": computing.get("dtype"),
        "path": computing.get("path"),
        "uptime_s": max((gateway["uptime_s"] for gateway in now["gateways"].values()), default=0.0),
        "elapsed_s": elapsed_s,
        "requests_per_s": per_s(answers.total()),
        **rates(totals, "inputs", "tokens"),
        "latencies": [_latency(stage, now["stage_bounds_s"], grown["stages"][stage]["counts"]) for stage in STAGES],
        "errors": [
            {"status": status, "per_s": per_s(answers[status]), "num": num}
            for status, num in sorted(now["answers"].items())
            if status >= 400
        ],
        "faults": {name: now["totals"][name] for name in _FAULTS if now["totals"][name]},
        "queue": _part(now["queue"], "requests", "sequences", "tokens", "age_s"),
        "arena": _part(now["arena"], "rows", "rows_in_use"),
        "vector_cache": {
            **_part(now["vector_cache"], "max_bytes", "bytes"),
            "hit_share": _share(cache["hits"], cache["hits"] + cache["misses"]),
        },
        "batches": {
            "per_s": per_s(totals["batches"]),
            "mean_sequences": _share(totals["sequences"], totals["batches"]),
            "mean_tokens": _share(totals["tokens"], totals["batches"]),
            "mean_fill": _share(fill["sum"], sum(fill["counts"])),  # tokens ÷ room for tokens
            "padding_share": _share(totals["padding_tokens"], totals["tokens"] + totals["padding_tokens"]),
        },
        **{
            f"{kind}s": [entry_figures(kind, *entry) for entry in entries.items()]
            for kind in _ENTRIES
            if (entries := now[f"{kind}s"]) or kind != "model"
        },
        "num_processes": len(processes),
        "memory_bytes": sum(map(_memory, processes.values())),
        "cpu_cores": sum(cpu_shares.values()) if cpu_shares else None,
    }


def _growth(before: Any, now: Any) -> Any:
    """`now` with the growth of each number in its place; None for one that was not there before."""
    if isinstance(now, Mapping):
        return {name: _growth((before or {}).get(name), value) for name, value in now.items()}
    if isinstance(now, list):
        return list(map(_growth, before, now)) if before is not None else None
    return now - before if isinstance(now, int | float) and before is not None else None


def _part(entry: Stats, *names: str) -> dict[str, Any]:
    return {name: entry[name] for name in names}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _memory(process: Stats) -> float:
    num_bytes: float = process["proportional_bytes"] or process["resident_bytes"]
    return num_bytes


def _cpu_shares(before: Stats, now: Stats) -> dict[str, float]:
    """By process, if it is the same one."""
    elapsed_s, grown = now["now_s"] - before["now_s"], _growth(before["processes"], now["processes"])
    return {
        name: max(0.0, process["cpu_s"]) / elapsed_s
        for name, process in grown.items()
        if process["pid"] == 0 and elapsed_s > 0
    }


def _latency(stage: str, bounds: Sequence[float], counts: Sequence[float]) -> Figures:
    p50_s, p90_s, p99_s = (percentile(bounds, counts, share) for share in (0.5, 0.9, 0.99))
    return {"stage": stage, "num": sum(counts), "p50_s": p50_s, "p90_s": p90_s, "p99_s": p99_s}


def percentile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value that `share` of all values are below, or None without values.

    Values are taken to lie evenly in their bucket, as by histogram_quantile of Prometheus. Above the last bound the
    result is that bound.
    """
    num_left, lower = share * sum(counts), 0.0
    if num_left <= 0:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        if num_left <= count:
            return lower + (bound - lower) * num_left / count
        num_left -= count
        lower = bound
    return lower


# --- from answer to answer -------------------------------------------------------------------------------------


class History:
    """`add` each answer, in order."""

    def __init__(self) -> None:
        self.rates: deque[tuple[float, float, float]] = deque(maxlen=NUM_REMEMBERED)
        """Requests, inputs and tokens a second of the last answers, oldest first."""
        self._recent: deque[Stats] = deque(maxlen=NUM_REMEMBERED)

    def add(self, stats: Stats) -> Figures:
        if self._recent and not is_same_life(self._recent[-1], stats):
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

_HINTS = {
    401: "; --api-key, or VECD_API_KEY, is for one that has the scope metrics",
    404: "; where --admin-port or --admin-uds are set, the figures are there, and servers older than this have none",
}
"""By status, what is added to the server's message."""


async def fetch_stats(client: AsyncClient) -> Stats:
    """Raises VecdError."""
    try:
        body = await client.answer(Piece("/stats"))
    except VecdError as error:
        error.args = (f"{error}{_HINTS.get(error.status or 0, '')}",)
        raise
    return read_stats(body)


def is_final(error: VecdError) -> bool:
    """Whether another request would bring the same."""
    return error.reaction is Reaction.FATAL and not isinstance(error, Timeout)
