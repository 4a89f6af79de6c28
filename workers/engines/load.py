"""Loads the engine of a worker's configuration, with the selection made now or at an earlier start.

Owns the order: recall a selection, build its engine, check it with short probes; if there is none, take the lean engine
if the model's reference vectors are known and it gives them; else select among all engines, and remember. Imports torch
only where an engine or a comparison needs it. Called by `vecd.workers.process.main`, `vecd.workers.process.forkserver`
and `vecd.workers.check`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vecd.shm.card import ModelError
from vecd.shm.control import LOAD_TOKENS_PER_S
from vecd.workers.config import REFERENCE_FILE, WorkerConfig
from vecd.workers.engine import Engine, ReportProgress
from vecd.workers.engines.dummy import DummyEngine
from vecd.workers.engines.ordered_pair import check_order
from vecd.workers.engines.parity import compare, random_batch, short_probes, vectors_of, vectors_one_by_one
from vecd.workers.engines.precedence import is_lean_wanted
from vecd.workers.engines.references import Reference, recall_reference
from vecd.workers.engines.selection_cache import Selection, forget, recall, remember
from vecd.workers.engines.timing import why_slow
from vecd.workers.families.description import NotDescribed
from vecd.workers.installed import NEEDS_TORCH, has_torch
from vecd.workers.short_texts import SHORT_TEXT_TOKENS, recall_texts_per_s, remember_texts_per_s

if TYPE_CHECKING:
    from vecd.workers.engines.lean.engine import LeanEngine

log = logging.getLogger("vecd.engine")

_MEASURED_TOKENS = 64
"""Enough to tell a model of millions of parameters from one of billions; 4 ms for all-MiniLM-L6-v2."""

_TEXTS_OF_A_BATCH = {"cpu": (16, 64), "gpu": (64, 1024)}
_MEASURED_BATCHES = 3
_LONG_S = 0.05
"""After a batch that takes so long, no larger one is measured: its texts would hardly be faster."""

SelectElsewhere: TypeAlias = Callable[[ReportProgress], Selection]
"""Makes the selection in another process. Raises ModelError."""


def load_engine(
    config: WorkerConfig,
    report: ReportProgress,
    select_elsewhere: SelectElsewhere | None = None,
    *,
    must_measure: bool = False,
) -> Engine:
    """Build the engine of `config`, warm and compared with the reference model.

    The comparison is remembered in `config.cache_folder`; a remembered one is checked again with short probes. A new
    comparison runs in `select_elsewhere`, or in this process if that is None. The speed of the engine with short
    texts is remembered there, too, if `config` wants it measured. With `must_measure` the engine is chosen among
    several by their speed even where that needs torch and the lean engine by itself does not.

    Side effect: sets torch's number of threads, if the engine needs torch. Raises ModelError when the device cannot be
    used, or when the model cannot be loaded or cannot run the way `config` requires.
    """
    engine = _load(config, report, select_elsewhere, must_measure=must_measure)
    check_order(config, engine)
    if config.measures_short_texts and config.cache_folder and recall_texts_per_s(config) is None:
        remember_texts_per_s(config, _texts_per_s(config, engine))
    return engine


def _load(
    config: WorkerConfig, report: ReportProgress, select_elsewhere: SelectElsewhere | None, *, must_measure: bool
) -> Engine:
    if config.is_dummy:
        report("making a dummy engine")
        return DummyEngine(config.card, config.dummy_ms_per_text / 1000)
    if config.card.is_static:
        return _load_static(config, report)
    if config.device.startswith("cuda"):
        from vecd.workers.engines.torch import cuda

        cuda.describe(config.device)  # once here, where it is an error with a cause, and not a bug
    selection = recall(config)
    must_measure = must_measure and config.engine == "auto" and config.device == "cpu" and _has_others(config)
    # Only a lean engine may have been taken without its rivals.
    if selection is not None and (not must_measure or selection.times or selection.path != "lean"):
        try:
            return _build(config, selection, report)
        except Exception as error:  # whatever happened to the files, a new selection reports it better
            log.warning("the engine is selected anew: %s: %s", type(error).__name__, error)
            forget(config)
    selected = None if must_measure else _select_lean(config, report)
    if selected is not None:
        selection, engine = selected
        _describe(config, engine, selection)
    elif select_elsewhere is not None:
        selection = select_elsewhere(report)
        engine = _build(config, selection, report)
    else:
        from vecd.workers.engines.torch.selection import select  # imports torch

        selection, engine = select(config, report)
        _describe(config, engine, selection)
    if selection.parity:
        remember(config, selection)
    return engine


def expected_path(config: WorkerConfig) -> str | None:
    """The path of the engine that `load_engine` will give, if nothing has changed; None if it has to compare engines
    first. Never raises for a model that cannot be loaded."""
    if config.card.is_static:
        return "static"
    selection = recall(config)
    if selection is not None:
        return selection.path
    is_lean = is_lean_wanted(config) and (not _has_others(config) or recall_reference(config) is not None)
    return ("export" if config.card.export_file else "lean") if is_lean else None


def _load_static(config: WorkerConfig, report: ReportProgress) -> Engine:
    """A mean of rows has nothing to select: one engine, on the processor, in float32."""
    from vecd.workers.engines.static import StaticEngine

    report("mapping the table of embeddings")
    engine = StaticEngine(config.card)
    engine.facts[LOAD_TOKENS_PER_S] = _tokens_per_s(config, engine)
    if config.dtype not in ("auto", "float32"):
        engine.warnings.append(f"{config.dtype} is not available: static embeddings are computed in float32")
    return engine


def _has_others(config: WorkerConfig) -> bool:
    """Whether there are the other engines and the reference model. They need torch, and weights that it can load."""
    return has_torch() and not config.card.export_file


def _select_lean(config: WorkerConfig, report: ReportProgress) -> tuple[Selection, Engine] | None:
    """The lean engine, if it gives the model's remembered reference vectors; else None. Never imports torch.

    Raises ModelError instead of returning None where there is no other engine."""
    reference = recall_reference(config) if is_lean_wanted(config) else None
    if reference is None and _has_others(config):
        return None
    if reference is None and not config.unverified:
        raise ModelError(
            f"{config.card.folder}: its reference vectors are not known, and {_why_not_computed(config)}, or serve it "
            "uncompared with --unverified"
        )
    from vecd.workers.engines.lean.engine import LeanEngine

    try:
        engine = LeanEngine(config.card)
        selection = _uncompared(config, engine) if reference is None else _compared(config, engine, reference, report)
    except NotDescribed as error:
        if not has_torch():
            raise ModelError(f"{config.card.folder}: {error}; this {NEEDS_TORCH}") from None
        log.info("lean is not used: %s", error)
        return None
    if selection is None:
        return None
    if config.dtype == "int8" and not config.card.export_file:
        quantized = _select_int8(config, engine, selection, reference, report)
        if quantized is None:
            return None
        selection, engine = quantized
    engine.use_threads(config.num_threads)
    return selection, engine


def _select_int8(
    config: WorkerConfig, plain: "LeanEngine", selection: Selection, reference: Reference | None, report: ReportProgress
) -> tuple[Selection, "LeanEngine"] | None:
    """int8 in the place of `plain` and its selection, if it is within bounds and faster. If not, None where torch is
    installed, which may have another int8; else `plain`, with a warning."""
    from vecd.workers.engines.lean.engine import LeanEngine

    report("comparing lean int8 with float32")
    card = config.card
    quantized = LeanEngine(card, dtype="int8")
    probes = short_probes(card) if reference is None else reference.probes(card)
    expected = vectors_of(plain, probes, card.row_dim) if reference is None else reference.vectors
    parity = compare(vectors_of(quantized, probes, card.row_dim), expected, probes.span, card.main_output)
    why = "" if parity.is_within_bounds("int8") else f"its vectors are not the reference model's: {parity}"
    why = why or why_slow(card, quantized, plain)
    if not why:
        figures = {} if reference is None else reference.figures(parity)
        return replace(selection, dtype="int8", parity=figures), quantized
    log.info("lean int8 is not used: %s", why)
    if has_torch():
        return None
    return replace(selection, warnings=[*selection.warnings, f"lean int8 is not used: {why}"]), plain


def _compared(config: WorkerConfig, engine: Engine, reference: Reference, report: ReportProgress) -> Selection | None:
    """None for other vectors than the reference model's. Raises ModelError instead where there is no other engine."""
    path, dtype = engine.facts["path"], engine.facts["dtype"]
    report(f"comparing {path} {dtype} with the remembered reference vectors")
    card, probes = config.card, reference.probes(config.card)
    parity = compare(vectors_of(engine, probes, card.row_dim), reference.vectors, probes.span, card.main_output)
    if parity.is_within_bounds(dtype):
        return Selection(path, dtype, reference.figures(parity), reference.vectors)
    if config.card.export_file:
        raise ModelError(f"{config.card.export_file}: its vectors are not those of {REFERENCE_FILE}: {parity}")
    why = f"{path} {dtype} is not used: its vectors are not the reference model's: {parity}"
    if not has_torch():
        raise ModelError(f"{config.card.folder}: {why}; another engine {NEEDS_TORCH}")
    log.warning("%s", why)
    return None


def _uncompared(config: WorkerConfig, engine: Engine) -> Selection:
    """A selection without a parity. Raises ModelError for vectors that are not finite, and for those of an engine that
    depend on what else is in a batch."""
    path, dtype = engine.facts["path"], engine.facts["dtype"]
    probes, row_dim = short_probes(config.card), config.card.row_dim
    vectors = vectors_of(engine, probes, row_dim)
    if not np.isfinite(vectors).all():
        raise ModelError(f"{config.card.folder}: the vectors contain nan or infinity")
    alone = compare(vectors, vectors_one_by_one(engine, probes, row_dim), probes.span, config.card.main_output)
    if not alone.is_within_bounds(dtype):
        raise ModelError(f"{config.card.folder}: a text has another vector in a batch than alone: {alone}")
    needed = "the model's own weights" if config.card.export_file else "torch"
    warning = f"--unverified: the vectors are not compared with the reference model's, which needs {needed}"
    return Selection(path, dtype, {}, np.empty((0, row_dim), np.float32), [warning])


def _why_not_computed(config: WorkerConfig) -> str:
    """Why the reference vectors are not computed, and what to do."""
    if config.card.export_file:
        return (
            f"an ONNX export has no weights to compute them from: copy {REFERENCE_FILE} from the folder that it was "
            "made of, where `vecd check --remember` writes it"
        )
    return "there is no torch to compute them: run `vecd check --remember` on it where torch is installed"


def _build(config: WorkerConfig, selection: Selection, report: ReportProgress) -> Engine:
    """The engine of a selection, warm. Raises ModelError when its vectors are not those of the selection."""
    report(f"loading weights for {selection.path} {selection.dtype}")
    engine: Engine
    if selection.path in ("lean", "export"):
        from vecd.workers.engines.lean.engine import LeanEngine

        engine = LeanEngine(config.card, dtype=selection.dtype)
    else:
        from vecd.workers.engines.torch.build import build_engine

        engine = build_engine(config, selection.path, selection.dtype)
    engine.use_threads(config.num_threads)
    probes = short_probes(config.card)
    vectors = vectors_of(engine, probes, config.card.row_dim)
    parity = compare(vectors, selection.reference[: len(vectors)], probes.span, config.card.main_output)
    if not parity.is_within_bounds(selection.dtype):
        raise ModelError(f"{config.card.folder}: the vectors are not the reference model's any more: {parity}")
    _describe(config, engine, selection)
    return engine


def _describe(config: WorkerConfig, engine: Engine, selection: Selection) -> None:
    engine.facts["agreement"] = selection.parity or None
    engine.facts["times_ms"] = selection.times
    engine.facts[LOAD_TOKENS_PER_S] = _tokens_per_s(config, engine)
    engine.warnings = list(selection.warnings)
    if config.card.export_file and config.dtype not in ("auto", selection.dtype):
        engine.warnings.append(f"{config.dtype} is not available: the ONNX export is computed in {selection.dtype}")


def _tokens_per_s(config: WorkerConfig, engine: Engine) -> float:
    """The speed of a warm engine with one short sequence: a first guess, until requests have been measured."""
    batch = random_batch(config.card, (_MEASURED_TOKENS,))
    started_at = time.perf_counter()
    vectors_of(engine, batch, config.card.row_dim)
    return float(batch.lengths.sum() / max(1e-6, time.perf_counter() - started_at))


def _texts_per_s(config: WorkerConfig, engine: Engine) -> float:
    """Short texts a second of a warm engine, in batches that are large enough for it: the fastest of a few. Takes 0.5 s
    with all-MiniLM-L6-v2. On a processor it is the time of the process, which computes with one thread, because other
    programs disturb that less."""
    clock = time.process_time if config.device == "cpu" else time.perf_counter
    fastest = 0.0
    for num_texts in _TEXTS_OF_A_BATCH["cpu" if config.device == "cpu" else "gpu"]:
        batch = random_batch(config.card, (SHORT_TEXT_TOKENS,) * num_texts)
        for _ in range(_MEASURED_BATCHES):
            started_at = clock()
            vectors_of(engine, batch, config.card.row_dim)
            taken_s = max(1e-6, clock() - started_at)
            fastest = max(fastest, num_texts / taken_s)
        if taken_s > _LONG_S:
            break
    return fastest
