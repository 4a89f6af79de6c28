"""Recommends settings for a model on a machine, from what was measured; docs/check.md has the rules as a table.

Owns the rules and their constants. Pure. Called by `vecd.launch.check.command`.
"""

import math
import statistics
from collections.abc import Sequence

from vecd.launch.check.report import Advice, Machine, Measurements, Path, Setting, Speed
from vecd.launch.config.num_gateways import GATEWAY_S_PER_REQUEST, needed_gateways
from vecd.shm.batch_limits import FULL_BATCH_S, MAX_BATCH_TOKENS, MAX_BATCH_TOKENS_ON_GPU
from vecd.workers.check.order import USED_MEMORY

SERVER_MB = 300
"""The supervisor, a gateway with a tokenizer, and the requests that they hold."""
_GATEWAY_MB = 150
_CLEARLY_FASTER = 1.1
"""From this factor on, a shorter type is worth less exact vectors, and a larger batch is worth its latency. Smaller
factors are within the noise of a busy machine."""

_NEARLY_ALL = 0.95
"""Fewer workers are enough if they have this share of the best throughput; they need less memory."""

_LEAST_CORE_SHARE = 0.9


def advise(machine: Machine, given: dict[str, str | int], path: Path, measured: Measurements) -> Advice:
    """`given`: settings that say what is served; they are kept. Without speeds, the rules of `vecd serve` decide."""
    dtype, notes = _dtype(path, measured), _int8_notes(measured)
    of_dtype = [speed for speed in measured.speeds if speed.dtype == dtype.value]
    shortest = min((speed.text_tokens for speed in of_dtype), default=0)
    short = [speed for speed in of_dtype if speed.text_tokens == shortest]
    texts_per_s = short[0].undisturbed_texts_per_s if short else 0.0
    workers, reason = _workers(machine, path, measured, texts_per_s)
    private_mb = max((speed.private_mb for speed in measured.speeds), default=0)
    fixed_mb = SERVER_MB + _GATEWAY_MB * (_gateways(machine, workers, texts_per_s) - 1) + path.shared_mb
    room_mb = USED_MEMORY * machine.available_mb
    if machine.available_mb and fixed_mb + workers * private_mb > room_mb:
        share = f"{room_mb:,.0f} MB are {USED_MEMORY:.0%} of what is available"
        reason = f"memory for no more: {fixed_mb:,} MB for all and {private_mb:,} MB for each, and {share}"
        if fixed_mb + private_mb > room_mb:
            reason, needed = "memory is short even for one", f"about {fixed_mb + private_mb:,} MB are needed"
            notes.append(f"memory is short even for one worker: {needed}, and {share}")
        workers = min(workers, max(1, int((room_mb - fixed_mb) // private_mb))) if private_mb else 1
    gateways = _gateways(machine, workers, texts_per_s)
    why_gateways = "enough unless parsing and encoding take more than a core (not measured)"
    if short:
        cores = workers * texts_per_s * GATEWAY_S_PER_REQUEST
        why_gateways = f"{workers * texts_per_s:,.0f} short texts/s of the workers take {cores:.2f} cores of gateway"
    settings = [
        *(Setting(name, value, "") for name, value in given.items()),
        Setting("workers", workers, reason),
        dtype,
        Setting("gateways", gateways, why_gateways),
        Setting("max_batch_tokens", *_batch_tokens(path, short)),
    ]
    return Advice(tuple(settings), tuple(notes))


def is_disturbed(measured: Measurements) -> bool:
    """Whether other programs used the same cores. All speeds are then too low, most of all those of several workers."""
    return measured.core_share < _LEAST_CORE_SHARE


# --- dtype ------------------------------------------------------------------------------------------------------


def _dtype(path: Path, measured: Measurements) -> Setting:
    """What `vecd serve` takes, for its reason, and the speeds that were measured here."""
    selected = path.reasons[-1].partition(": ")[2] if path.reasons else "what --dtype auto selects here"
    is_alone = path.dtype == "float32" and "bfloat16" in measured.not_measured and bool(measured.speeds)
    reason = "the only type that this processor computes natively" if is_alone else selected
    return Setting("dtype", path.dtype, reason + _parity({} if path.dtype == "float32" else path.probes))


def _int8_notes(measured: Measurements) -> list[str]:
    dtypes = {speed.dtype for speed in measured.speeds}
    if not {"int8", "float32"} <= dtypes:
        return []
    base = "bfloat16" if "bfloat16" in dtypes else "float32"
    cosine = measured.agreements.get("int8", {}).get("min_cosine")
    exactness = "" if cosine is None else f" with less exact vectors (cosine {cosine:.4f})"
    factor = _factor(measured, "int8", base)
    return [f"--dtype int8 has {factor:.2f} times the tokens/s of {base}{exactness}: yours to choose"]


def _parity(parity: dict[str, float]) -> str:
    cosine = parity.get("min_cosine")
    return "" if cosine is None else f", cosine {cosine:.5f} or better"


def _factor(measured: Measurements, dtype: str, base: str) -> float:
    """The ratio of speeds over the same lengths of text: the geometric mean."""
    of_base = {speed.text_tokens: speed.tokens_per_s for speed in measured.speeds if speed.dtype == base}
    factors = [
        speed.tokens_per_s / of_base[speed.text_tokens]
        for speed in measured.speeds
        if speed.dtype == dtype and of_base.get(speed.text_tokens)
    ]
    return statistics.geometric_mean(factors) if factors else 1.0


# --- workers, gateways, batches ---------------------------------------------------------------------------------


def _workers(machine: Machine, path: Path, measured: Measurements, texts_per_s: float) -> tuple[int, str]:
    if path.device != "cpu":
        return max(1, len(machine.gpus)), "one for each GPU"
    cores = machine.num_usable_cores
    useful, reason = _useful_cores(machine, measured)
    # The gateways' share of the cores for the texts of all workers; less than a whole core costs no worker.
    share = texts_per_s * GATEWAY_S_PER_REQUEST
    count = min(useful, max(1, math.ceil((cores + 1) / (1 + share)) - 1))
    if count < useful:
        reason = f"{cores} cores, of which the gateway needs about {count * share:.1f} with short texts"
    return count, reason


def _useful_cores(machine: Machine, measured: Measurements) -> tuple[int, str]:
    """The fewest workers that have nearly all of the throughput."""
    cores, physical = machine.num_usable_cores, machine.num_usable_physical_cores
    one_each = "one for the core" if cores == 1 else "one for each core that may be used"
    if not measured.scaling or is_disturbed(measured):
        if physical == cores:
            return cores, one_each
        return physical, f"one for each physical core: two threads of a core share its units ({cores} threads)"
    scaling = sorted(measured.scaling, key=lambda one: one.num_workers)
    best = max(one.tokens_per_s for one in scaling)
    enough = next(one for one in scaling if one.tokens_per_s >= _NEARLY_ALL * best)
    if enough.num_workers == 1:
        return 1, one_each if cores == 1 else f"more have {best / enough.tokens_per_s:.2f} times the throughput at most"
    times = enough.tokens_per_s / (scaling[0].tokens_per_s / scaling[0].num_workers)
    reason = f"together {times:.2f} times the tokens/s of one"
    if enough.num_workers < cores:
        return enough.num_workers, f"{reason}; more have hardly more ({cores} threads)"
    return enough.num_workers, f"{one_each}: {reason}"


def _gateways(machine: Machine, workers: int, texts_per_s: float) -> int:
    return min(machine.num_usable_cores, needed_gateways(workers * texts_per_s))


def _batch_tokens(path: Path, short: Sequence[Speed]) -> tuple[int, str]:
    """From the speeds with short texts, by size of batch."""
    if path.device != "cpu":
        return MAX_BATCH_TOKENS_ON_GPU, "the default for GPUs; other sizes were not measured"
    if not short:
        return MAX_BATCH_TOKENS, "the default (not measured)"
    rates = {speed.batch_tokens: speed.undisturbed_tokens_per_s for speed in short}
    reached = int(max(rates.values()) * FULL_BATCH_S)
    if reached <= MAX_BATCH_TOKENS:
        return MAX_BATCH_TOKENS, f"the default; {FULL_BATCH_S:g} s, a batch's limit, are {reached:,} tokens here"
    larger = sorted(size for size in rates if size > MAX_BATCH_TOKENS)
    for size in larger:
        factor = rates[size] / rates[min(rates)]
        if factor >= _CLEARLY_FASTER:
            return size, f"{factor:.2f} times the tokens/s of batches of {min(rates):,} tokens"
    return MAX_BATCH_TOKENS, "the default; larger batches were no faster" if larger else "the default"
