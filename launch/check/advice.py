"""A configuration for this model on this machine, derived from what was measured, each setting with its reason.

Owns the rules. Pure: from a machine, a model, a path and measurements to settings and notes. Called by
`vecd.launch.check.command`.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from vecd.launch.check.report import Advice, Machine, Measurements, Path, Setting, Speed
from vecd.shm.batch_limits import FULL_BATCH_S, MAX_BATCH_TOKENS, MAX_BATCH_TOKENS_ON_GPU

GATEWAY_S_PER_REQUEST = 300e-6
"""Processor time of the gateway for one short text. Measured with the real model, whose workers share the caches, and
64 clients on two cores: 292 µs (docs/log.md)."""

SERVER_MB = 300
"""Of the supervisor and a gateway with a tokenizer, and what they hold of requests."""
_GATEWAY_MB = 150
_GATEWAY_SHARE = 0.6
"""Of a core that one gateway should use: above it, answers wait for each other."""

_MAX_GATEWAYS = 64
_USED_MEMORY = 0.8
"""Of what is available: the rest is for the files that the kernel keeps, and for what nobody has thought of."""

_CLEARLY_FASTER = 1.1
"""From which on a shorter type is worth its less exact vectors, and more tokens a batch their latency. Below it, a
measurement on a busy machine says nothing."""

_NEARLY_ALL = 0.95
"""So much of the best throughput is enough for fewer workers: they take less memory."""

_LEAST_CORE_SHARE = 0.9


def advise(machine: Machine, given: dict[str, str | int], path: Path, measured: Measurements) -> Advice:
    """`given`: settings that say what is served, and are kept as they are. Without speeds, what the rules of `vecd
    serve` would choose, and that it was not measured."""
    dtype, notes = _dtype(machine, path, measured)
    private_mb = max((speed.private_mb for speed in measured.speeds), default=0)
    workers = _workers(machine, path, measured, dtype.value)
    gateways = _gateways(machine, workers, measured, dtype.value)
    workers, memory_notes = _fitted(workers, gateways, machine, path, private_mb)
    batch = _batch_tokens(path, measured, dtype.value)
    settings = [workers, dtype, _gateways(machine, workers, measured, dtype.value), batch]
    kept = [Setting(name, value, "") for name, value in given.items()]
    return Advice((*kept, *settings), (*notes, *memory_notes))


def is_disturbed(measured: Measurements) -> bool:
    """Whether other programs ran on the same cores: figures are then too low, and those of several workers most."""
    return measured.core_share < _LEAST_CORE_SHARE


# --- dtype ------------------------------------------------------------------------------------------------------


def _dtype(machine: Machine, path: Path, measured: Measurements) -> tuple[Setting, list[str]]:
    speeds = _speeds_by_dtype(measured)
    notes: list[str] = []
    if "int8" in speeds and "float32" in speeds:
        base = "bfloat16" if "bfloat16" in speeds else "float32"
        factor = _factor(speeds["int8"], speeds[base])
        cosine = measured.agreements.get("int8", {}).get("min_cosine")
        exactness = f" with less exact vectors (cosine {cosine:.4f})" if cosine is not None else ""
        notes.append(f"--dtype int8 has {factor:.2f} times the tokens/s of {base}{exactness}: yours to choose")
    if path.device != "cpu" or not speeds:
        return Setting("dtype", path.dtype, _why_chosen(path)), notes
    if "float32" not in speeds or len(speeds) == 1:
        is_only = path.dtype == "float32" and "bfloat16" in measured.not_measured
        reason = "the only type that this processor computes natively" if is_only else _why_chosen(path)
        return Setting("dtype", path.dtype, reason), notes
    short = "bfloat16"
    if short in speeds:
        factor = _factor(speeds[short], speeds["float32"])
        if factor >= _CLEARLY_FASTER:
            agrees = _agrees(measured.agreements.get(short, {}))
            return Setting("dtype", short, f"{factor:.2f} times the tokens/s of float32{agrees}"), notes
        return Setting(
            "dtype", "float32", f"bfloat16 has {factor:.2f} times its tokens/s, which is not worth it"
        ), notes
    return Setting("dtype", "float32", "exact, and the fastest of the types that need no decision of yours"), notes


def _why_chosen(path: Path) -> str:
    """What the path says of its dtype, which is the last of its reasons."""
    reason = path.reasons[-1].partition(": ")[2] if path.reasons else "what --dtype auto chooses here"
    return reason + ("" if path.dtype == "float32" else _agrees(path.probes))


def _agrees(parity: dict[str, float]) -> str:
    cosine = parity.get("min_cosine")
    return "" if cosine is None else f", cosine {cosine:.5f} or better with the plain model"


def _speeds_by_dtype(measured: Measurements) -> dict[str, list[Speed]]:
    found: dict[str, list[Speed]] = {}
    for speed in measured.speeds:
        found.setdefault(speed.dtype, []).append(speed)
    return found


def _factor(ours: Iterable[Speed], theirs: Iterable[Speed]) -> float:
    """How many times as fast, over the same lengths of text: the geometric mean."""
    by_length = {speed.text_tokens: speed.tokens_per_s for speed in theirs}
    factors = [s.tokens_per_s / by_length[s.text_tokens] for s in ours if by_length.get(s.text_tokens)]
    return math.exp(sum(map(math.log, factors)) / len(factors)) if factors else 1.0


def _shortest(measured: Measurements, dtype: str | int) -> Speed | None:
    """Of a dtype, the speed with the shortest texts."""
    return min((s for s in measured.speeds if s.dtype == dtype), key=lambda s: s.text_tokens, default=None)


# --- workers and gateways ---------------------------------------------------------------------------------------


def _workers(machine: Machine, path: Path, measured: Measurements, dtype: str | int) -> Setting:
    if path.device != "cpu":
        return Setting("workers", max(1, len(machine.gpus)), "one for each GPU")
    cores = machine.num_usable_cores
    useful, reason = _useful_cores(machine, measured)
    speed = _shortest(measured, dtype)
    if speed is None:
        return Setting("workers", useful, reason)
    # What the gateways take for the texts of all workers is no worker's; less than a whole core costs none.
    share = speed.texts_per_s * GATEWAY_S_PER_REQUEST
    count = min(useful, max(1, math.ceil((cores + 1) / (1 + share)) - 1))
    if count < useful:
        taken = count * share
        reason = f"{cores} cores, of which the gateway needs about {taken:.1f} with short texts"
    return Setting("workers", count, reason)


def _useful_cores(machine: Machine, measured: Measurements) -> tuple[int, str]:
    """The fewest workers that have nearly all of the throughput."""
    cores, physical = machine.num_usable_cores, machine.num_usable_physical_cores
    one_each = "one for the core" if cores == 1 else "one for each core that may be used"
    if not measured.scaling or is_disturbed(measured):
        if physical < cores:
            return physical, f"one for each physical core: two threads of a core share what computes ({cores} threads)"
        return cores, one_each
    best = max(scaling.tokens_per_s for scaling in measured.scaling)
    for scaling in sorted(measured.scaling, key=lambda scaling: scaling.num_workers):
        if scaling.tokens_per_s >= _NEARLY_ALL * best:
            break
    first = min(measured.scaling, key=lambda scaling: scaling.num_workers)
    times = scaling.tokens_per_s / (first.tokens_per_s / first.num_workers)
    if scaling.num_workers == 1:
        why = (
            one_each
            if cores == 1
            else f"more have no higher throughput: {best / scaling.tokens_per_s:.2f} times at most"
        )
    else:
        why = f"{one_each}: together {times:.2f} times the tokens/s of one"
        if scaling.num_workers < cores:
            why = f"together {times:.2f} times the tokens/s of one, and more have hardly more ({cores} threads)"
    return scaling.num_workers, why


def _gateways(machine: Machine, workers: Setting, measured: Measurements, dtype: str | int) -> Setting:
    speed = _shortest(measured, dtype)
    if speed is None:
        return Setting("gateways", 1, "enough unless parsing and encoding take more than a core (not measured)")
    requests = int(workers.value) * speed.texts_per_s
    share = requests * GATEWAY_S_PER_REQUEST
    count = max(1, min(_MAX_GATEWAYS, machine.num_usable_cores, math.ceil(share / _GATEWAY_SHARE)))
    return Setting(
        "gateways", count, f"the workers compute {requests:,.0f} short texts/s, which take {share:.2f} cores of gateway"
    )


# --- memory and batches -----------------------------------------------------------------------------------------


def _fitted(
    workers: Setting, gateways: Setting, machine: Machine, path: Path, private_mb: int
) -> tuple[Setting, list[str]]:
    """As many workers as memory suffices for."""
    fixed = SERVER_MB + _GATEWAY_MB * (int(gateways.value) - 1) + path.shared_mb
    room = _USED_MEMORY * machine.available_mb
    needed = fixed + int(workers.value) * private_mb
    if not machine.available_mb or needed <= room:
        return workers, []
    count = max(1, int((room - fixed) // private_mb)) if private_mb else 1
    if fixed + private_mb > room:
        note = (
            f"memory is short even for one worker: about {fixed + private_mb:,} MB are needed, and {room:,.0f} MB are "
            f"{_USED_MEMORY:.0%} of what is available"
        )
        return replace(workers, value=1, reason="memory is short even for one"), [note]
    reason = (
        f"memory for no more: {fixed:,} MB for all and {private_mb:,} MB for each, and {room:,.0f} MB are "
        f"{_USED_MEMORY:.0%} of what is available"
    )
    return replace(workers, value=min(count, int(workers.value)), reason=reason), []


def _batch_tokens(path: Path, measured: Measurements, dtype: str | int) -> Setting:
    name, default = "max_batch_tokens", MAX_BATCH_TOKENS
    if path.device != "cpu":
        return Setting(name, MAX_BATCH_TOKENS_ON_GPU, "the default for GPUs; larger and smaller ones were not measured")
    short = _shortest(measured, dtype)
    if short is None:
        return Setting(name, default, "the default (not measured)")
    same = [speed for speed in measured.speeds if (speed.dtype, speed.text_tokens) == (dtype, short.text_tokens)]
    rates = {speed.batch_tokens: speed.undisturbed_tokens_per_s for speed in same}
    reached = int(max(rates.values()) * FULL_BATCH_S)
    larger = sorted(size for size in rates if size > default)
    if reached <= default:
        reason = (
            f"the default; a batch may take a quarter of a second, in which a worker computes {reached:,} tokens, so a "
            "larger limit would change nothing"
        )
        return Setting(name, default, reason)
    for size in larger:
        factor = rates[size] / rates[min(rates)]
        if factor >= _CLEARLY_FASTER:
            return Setting(name, size, f"{factor:.2f} times the tokens/s of batches of {min(rates):,} tokens")
    return Setting(name, default, "the default; larger batches were no faster" if larger else "the default")
