"""Loads the engine of a worker's configuration, with the selection made now or at an earlier start.

Owns the order: recall a selection, build its engine, check it with short probes; if there is none, take the lean engine
if it can be chosen without torch; else select among all engines, and remember.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from vecd.model.card import ModelCard, ModelError
from vecd.model.files import stored_tensors
from vecd.shm.control import LOAD_TOKENS_PER_S
from vecd.workers.batch import Engine, ReportProgress
from vecd.workers.config import WorkerConfig
from vecd.workers.dummy import DummyEngine
from vecd.workers.families import WITHOUT_CLASS
from vecd.workers.formats import is_lean_wanted
from vecd.workers.parity import compare, random_batch, recall_reference, short_probes, vectors_of
from vecd.workers.select import (
    Selection,
    build,
    check_order,
    forget,
    has_others,
    recall,
    remember,
    select,
    select_lean,
    stamps,
)

log = logging.getLogger("vecd.engine")

_MEASURED_TOKENS = 64
"""Enough to tell a model of millions of parameters from one of billions; 4 ms for all-MiniLM-L6-v2."""

SelectElsewhere: TypeAlias = Callable[[ReportProgress], Selection]


def load_engine(
    config: WorkerConfig, report: ReportProgress, select_elsewhere: SelectElsewhere | None = None
) -> Engine:
    """Build the engine of `config`, warm and compared with the reference model. The comparison is remembered in
    `config.cache_dir`; a remembered one is checked again with short probes. A new comparison runs in
    `select_elsewhere`, or in this process. Side effect: sets torch's number of threads.

    Raises ModelError when the model cannot be loaded or cannot run the way `config` requires.
    """
    if not config.is_dummy:
        check_headers(config.card)
    before = _stamps_of(config)
    engine = _load(config, report, select_elsewhere)
    if _stamps_of(config) != before:
        raise ModelError(f"{config.card.folder}: the files have changed while they were read")
    check_order(config, engine)
    return engine


def check_headers(card: ModelCard) -> None:
    """Raises ModelError for a safetensors file that is not whole. One that is missing is left to who reads it."""
    paths = card.step_files
    with suppress(ModelError):
        paths += card.weight_files
    for path in paths:
        if path.suffix == ".safetensors" and path.exists():
            stored_tensors(path)


def _stamps_of(config: WorkerConfig) -> list[Any] | None:
    """None without the files."""
    with suppress(OSError):
        return None if config.is_dummy else stamps(config)
    return None


def _load(config: WorkerConfig, report: ReportProgress, select_elsewhere: SelectElsewhere | None) -> Engine:
    if config.is_dummy:
        report("making a dummy engine")
        return DummyEngine(config.card, config.dummy_ms_per_text / 1000)
    if config.card.is_static:
        return _load_static(config, report)
    if config.device.startswith("cuda"):
        from vecd.workers.torch import cuda

        cuda.describe(config.device)  # once here, where it is an error with a cause, and not a bug
    selection = recall(config)
    if selection is not None:
        try:
            return _build(config, selection, report)
        except Exception as error:  # whatever happened to the files, a new selection reports it better
            log.warning("the engine is selected anew: %s: %s", type(error).__name__, error)
            forget(config)
    found = select_lean(config, report) if is_lean_wanted(config) else None
    if found is None and select_elsewhere is not None:
        selection = select_elsewhere(report)
        engine = _build(config, selection, report)
    else:
        selection, engine = found or select(config, report)
        engine.use_threads(1)
        _describe(config, engine, selection)
    if selection.parity:
        remember(config, selection)
    return engine


def expected_path(config: WorkerConfig) -> str | None:
    """The path that `load_engine` will take; None if engines that need torch have to be compared first. Never raises
    for a model that cannot be loaded."""
    if config.card.is_static:
        return "static"
    selection = recall(config)
    if selection is not None:
        return selection.path
    is_lean = is_lean_wanted(config) and (not has_others(config) or recall_reference(config) is not None)
    return ("export" if config.card.export_file else "lean") if is_lean else None


def _load_static(config: WorkerConfig, report: ReportProgress) -> Engine:
    """One engine, on the processor, in float32."""
    from vecd.workers.static import StaticEngine

    report("reading the table of embeddings")
    engine = StaticEngine(config.card)
    engine.facts[LOAD_TOKENS_PER_S] = _tokens_per_s(config, engine)
    if config.dtype not in ("auto", "float32"):
        engine.warnings.append(f"{config.dtype} is not available: static embeddings are computed in float32")
    return engine


def _build(config: WorkerConfig, selection: Selection, report: ReportProgress) -> Engine:
    """Raises ModelError when its vectors are not those of the selection."""
    report(f"loading weights for {selection.path} {selection.dtype}")
    engine = build(config, selection.path, selection.dtype)
    engine.use_threads(1)
    probes = short_probes(config.card)
    vectors = vectors_of(engine, probes, config.card.row_dim)
    parity = compare(vectors, selection.reference[: len(vectors)], probes.span, config.card.main_output)
    if not parity.is_within_bounds(selection.dtype):
        raise ModelError(f"{config.card.folder}: the vectors are not the reference model's any more: {parity}")
    _describe(config, engine, selection)
    return engine


def _describe(config: WorkerConfig, engine: Engine, selection: Selection) -> None:
    engine.facts["agreement"] = selection.parity or None
    if selection.parity:
        score = config.card.score
        is_own = config.card.model_type in WITHOUT_CLASS or not (score is None or score.has_class)
        engine.facts["compared_with"] = "vecd's own padded path" if is_own else "transformers"
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
