"""What each model needs: remembered from an earlier start, or predicted.

Owns the files in the cache directory. A footprint holds for one set of model files, one configuration of its workers,
one version of vecd and one processor; anything else is another file. A wrong one is never a wrong vector.

    <cache directory>/memory/<key>.json     {"shared": …, "per_worker": …}, in bytes, written by a rename
"""

import hashlib
import json
import logging
import math
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vecd.base.failures import ConfigurationError
from vecd.base.files import read_json, write_json
from vecd.launch.config.plan import Plan
from vecd.model.card import ModelError
from vecd.model.files import stored_tensors
from vecd.shm.output import MAX_BATCH_TOKENS
from vecd.shm.settings import Settings, read_memory_budget
from vecd.workers.config import WorkerConfig
from vecd.workers.families import FUSED_FAMILIES
from vecd.workers.formats import LARGEST_MEASURED, formats_of, is_lean_wanted
from vecd.workers.machine import cpuinfo, kilobytes, memory_limit_mb

# The memory of a model's processes: as predicted from its files, and as the kernel reports it.
#
# Memory is proportional (PSS): a page that several processes share is counted once over all of them. The memory of GPUs
# is not counted. Reads headers and no tensor.
#
# Predicted is what a model needs once every word of its vocabulary has been used, with full batches; a worker that has
# cores leased may need a little more. The constants are measured on 2 cores of an AMD EPYC with AVX512-BF16, of servers
# of one model with 2 workers. The predictions are 1.10 to 1.34 times what such servers needed on an Intel Xeon, which
# `tests/unit/launch/test_footprint.py` has.

_MB = 1 << 20

_IMPORTS = {"": (62 * _MB, 25 * _MB), "torch": (310 * _MB, 45 * _MB), "transformers": (420 * _MB, 70 * _MB)}
"""Of a fork server with its imports: in a server of one model, and beside a zygote, whose imports it shares."""
_ZYGOTE_NBYTES = {"": 75 * _MB, "torch": 270 * _MB, "transformers": 360 * _MB}
_SUPERVISOR_NBYTES, _GATEWAY_NBYTES = 36 * _MB, 50 * _MB
_TOKENIZER_NBYTES, _PER_TOKENIZER_BYTE = 2 * _MB, 12
"""Of a gateway, for each model: its tokenizer has tables of what a file of JSON says."""
_WORKER_NBYTES, _DUMMY_NBYTES = 15 * _MB, 30 * _MB
"""What a worker has for itself before its first batch and after."""
_GPU_WORKER_NBYTES = 1536 * _MB
"""Of CUDA's libraries and context, in main memory. A guess: not measured."""
_LEAN_TOKENS = 512
"""Of a pass of the engine without torch."""
_FLOATS_PER_HIDDEN = 8
"""In memory at a time: four of the layer in the middle, three of queries, keys and values, and the hidden states."""
_LOGIT_NBYTES = 16 * _MB
"""Of sparse vectors: logits are computed for a part of the tokens or of the vocabulary at a time."""
_BYTES_PER_FLOAT = 4
_BYTES = {"bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Footprint:
    shared: int
    per_worker: int
    num_workers: int

    @property
    def total(self) -> int:
        return self.shared + self.per_worker * self.num_workers


def predict(plan: Plan) -> Footprint:
    """What the processes of `plan` will need, as far as the model's files say. Raises ModelError for weights that are
    missing or broken."""
    config, num_workers = plan.workers[0], len(plan.workers)
    arena = config.arena
    rows = min(arena.rows_per_slot, MAX_BATCH_TOKENS)
    arena_nbytes = arena.num_all_slots * rows * arena.dim * _BYTES_PER_FLOAT
    alone, beside_others = _IMPORTS[_library(config)]
    base = alone if plan.is_only_model else beside_others
    if config.is_dummy:
        return Footprint(_DUMMY_NBYTES, _WORKER_NBYTES + arena_nbytes, num_workers)
    if config.device != "cpu":
        return Footprint(base, _GPU_WORKER_NBYTES + arena_nbytes, num_workers)
    has_torch = bool(_library(config))
    tokens = plan.gateway.max_batch_tokens if has_torch else min(plan.gateway.max_batch_tokens, _LEAN_TOKENS)
    activations = 0 if config.card.is_static else tokens * config.card.hidden_size * _FLOATS_PER_HIDDEN
    if config.card.sparse is not None:
        activations += _LOGIT_NBYTES // _BYTES_PER_FLOAT
    per_worker = _WORKER_NBYTES + activations * _BYTES_PER_FLOAT + arena_nbytes
    return Footprint(base + _weights_nbytes(config), per_worker, num_workers)


def predict_server(plans: Sequence[Plan]) -> int:
    """Bytes of the processes that belong to no model. `plans`: of all models. Reads the file system."""
    first = plans[0].gateway
    tokenizers = len(plans) * _TOKENIZER_NBYTES
    for plan in plans:
        with suppress(OSError):
            tokenizers += _PER_TOKENIZER_BYTE * Path(plan.gateway.card.tokenizer_file).stat().st_size
    zygote = max(_ZYGOTE_NBYTES[_library(plan.workers[0])] for plan in plans) if len(plans) > 1 else 0
    return _SUPERVISOR_NBYTES + first.gateways * (_GATEWAY_NBYTES + tokenizers) + zygote + first.vector_cache


def measured(pids: Sequence[int], worker_pids: Sequence[int]) -> Footprint | None:
    """What the kernel reports of a model's processes. `pids`: of all of them. None if one has ended meanwhile. Reads
    /proc, which takes milliseconds for each process."""
    own = [_of_process(pid, "Private_Clean") + _of_process(pid, "Private_Dirty") for pid in worker_pids]
    every = [_of_process(pid, "Pss") for pid in pids]
    if not all([*own, *every]):
        return None
    per_worker = sum(own) // max(1, len(own))
    return Footprint(sum(every) - per_worker * len(own), per_worker, len(own))


def _of_process(pid: int, name: str) -> int:
    return kilobytes(Path(f"/proc/{pid}/smaps_rollup"), name) << 10


def _library(config: WorkerConfig) -> str:
    card = config.card
    if config.is_dummy or card.is_static or is_lean_wanted(config):
        return ""
    is_fused = config.engine in ("auto", "fused") and card.model_type in FUSED_FAMILIES
    return "torch" if is_fused else "transformers"


def _weights_nbytes(config: WorkerConfig) -> int:
    """What an engine keeps of the files' tensors: layers in the type that computes, embeddings in float32."""
    card = config.card
    if card.is_static:
        return card.weights_bytes
    if card.export_file:
        return 2 * card.weights_bytes  # ONNX Runtime lays matrices out anew, and keeps what it has read
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = formats_of(config)[0] if card.weights_bytes > LARGEST_MEASURED else "float32"
    stored = made = 0
    for path in card.weight_files:
        for name, tensor in stored_tensors(path).items():
            nbytes = _BYTES_PER_FLOAT if "embed" in name else _BYTES.get(dtype, _BYTES_PER_FLOAT)
            stored += tensor.nbytes
            made += math.prod(tensor.shape) * nbytes
    return max(0, card.weights_bytes - stored) + made


log = logging.getLogger("vecd.supervisor")

_FORMAT = 1
_MAX_FILE_BYTES = 1000
_MAX_NBYTES = 2**50


class MemoryBook:
    def __init__(self, budget: int | None, folder: Path, server_nbytes: int = 0) -> None:
        """`budget`: bytes for all processes of the server; None: no limit. `folder`: the cache directory.
        `server_nbytes`: of processes that belong to no model, which a reload may change."""
        self.budget = budget
        self.server_nbytes = server_nbytes
        self._folder = folder / "memory"
        self._known: dict[str, Footprint] = {}

    def expect(self, plan: Plan) -> Footprint:
        """As remembered, else as predicted. Reads the file system: not for an event loop."""
        return self.recall(plan) or self._predict(plan)

    def recall(self, plan: Plan) -> Footprint | None:
        key = self._key(plan)
        if key not in self._known:
            found = _read(self._folder / f"{key}.json", len(plan.workers))
            if found is None:
                return None
            self._known[key] = found
        return self._known[key]

    def remember(self, plan: Plan, footprint: Footprint) -> None:
        """Keep what was measured, and write it to the cache, if that can be written. Not for an event loop."""
        key = self._key(plan)
        self._known[key] = footprint
        try:
            write_json(self._folder / f"{key}.json", {"shared": footprint.shared, "per_worker": footprint.per_worker})
        except OSError as error:
            log.warning("the memory that %s needs cannot be remembered: %s", plan.gateway.model, error)

    def _predict(self, plan: Plan) -> Footprint:
        try:
            return predict(plan)
        except ModelError as error:  # the load reports it
            log.warning("the memory that %s needs is not known: %s", plan.gateway.model, error)
            return Footprint(2 * plan.card.weights_bytes, 0, len(plan.workers))

    def _key(self, plan: Plan) -> str:
        config = plan.workers[0]
        conditions = {
            "format": _FORMAT,
            "version": metadata.version("vecd"),
            "files": sorted(plan.model_files),
            "requested": [config.engine, config.dtype, config.device.partition(":")[0], plan.settings.kind],
            "workers": [len(plan.workers), config.num_threads, config.max_threads, plan.is_only_model],
            "batches": [plan.gateway.max_batch_tokens, plan.gateway.arena.nbytes],
            "processor": cpuinfo("model name") or platform.processor(),
        }
        return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:32]


def _read(path: Path, num_workers: int) -> Footprint | None:
    try:
        found = read_json(path, _MAX_FILE_BYTES)
        sizes = found["shared"], found["per_worker"]
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return None
    if not all(type(size) is int and 0 < size < _MAX_NBYTES for size in sizes):
        return None
    return Footprint(*sizes, num_workers)


# Whether the models of a configuration fit into `--memory-budget`, and the table that says so.


def make_book(plans: Sequence[Plan]) -> MemoryBook:
    """The book for the models of one configuration, whose budget they fit into. Reads the file system: not for an event
    loop. Raises ConfigurationError, with a table of who needs what, for models that do not fit, and for a share of a
    memory whose size is not known. Side effect: closes the plans then."""
    settings = plans[0].settings
    try:
        book = MemoryBook(_budget_of(settings), settings.cache_folder, predict_server(plans))
        if problems := _why_too_much(plans, book):
            raise ConfigurationError(*problems, *_needs(plans, book))
    except BaseException:
        for plan in plans:
            plan.close()
        raise
    return book


def in_mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def as_table(rows: Sequence[Sequence[str]], *, is_right: bool = False) -> list[str]:
    """`is_right`: all columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = str.rjust if is_right else str.ljust
    lines = []
    for first, *others in rows:
        cells = map(pad, others, widths[1:])
        lines.append("  ".join((first.ljust(widths[0]), *cells)).rstrip())
    return lines


def _budget_of(settings: Settings) -> int | None:
    if not settings.memory_budget:
        return None
    memory_mb = memory_limit_mb()
    if settings.memory_budget.rstrip().endswith("%") and not memory_mb:
        raise ConfigurationError(
            f"--memory-budget: {settings.memory_budget} given, but the system does not say of how much; give bytes"
        )
    return read_memory_budget(settings.memory_budget, memory_mb << 20)


def _why_too_much(plans: Sequence[Plan], book: MemoryBook) -> list[str]:
    """Lines for the operator; none for models that fit. Without a budget nothing is read."""
    if book.budget is None:
        return []
    totals = {plan.gateway.model: book.expect(plan).total for plan in plans}
    configs = [plan.gateway for plan in plans]
    pinned = sum(totals[each.model] for each in configs if each.pinned)
    at_start = sum(totals[each.model] for each in configs if not each.is_loaded_on_demand)
    needs = {"the models that are loaded at the start": at_start, "the pinned models": pinned}
    for each in configs:
        if each.is_loaded_on_demand and not each.pinned:
            needs[each.model] = pinned + totals[each.model]
    given = f"--memory-budget: {plans[0].settings.memory_budget} given, which is {in_mb(book.budget)}"
    return [
        f"{given}: {what} would need {in_mb(nbytes + book.server_nbytes)} with the server itself"
        + (" and the pinned models" if pinned and what in totals else "")
        for what, nbytes in needs.items()
        if nbytes and nbytes + book.server_nbytes > book.budget
    ]


def _needs(plans: Sequence[Plan], book: MemoryBook) -> list[str]:
    rows = [["model", "load", "memory", "pinned", "known by"]]
    for plan in plans:
        total, is_pinned = in_mb(book.expect(plan).total), "yes" if plan.gateway.pinned else "no"
        known_by = "measurement" if book.recall(plan) else "prediction"
        rows.append([plan.gateway.model, plan.settings.load, total, is_pinned, known_by])
    rows.append(["(the server itself)", "start", in_mb(book.server_nbytes), "yes", "prediction"])
    return as_table(rows)
