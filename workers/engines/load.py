"""Loads the engine of a worker's configuration, with the selection made now or at an earlier start.

Owns the order: recall a selection, build its engine, check it with short probes; if there is none, take the lean engine
if the model's reference vectors are known and it gives them; else select among all engines, and remember. Imports torch
only where an engine or a comparison needs it. Called by `vecd.workers.process.main`, `vecd.workers.process.forkserver`
and `vecd.workers.check`.
"""

import importlib.util
import logging
import time
from collections.abc import Callable
from typing import TypeAlias

from vecd.shm.card import ModelError
from vecd.shm.control import LOAD_TOKENS_PER_S
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine, ReportProgress
from vecd.workers.engines.dummy import DummyEngine
from vecd.workers.engines.parity import compare, random_batch, short_probes, vectors_of
from vecd.workers.engines.references import recall_reference
from vecd.workers.engines.selection_cache import Selection, forget, recall, remember
from vecd.workers.families.description import NotDescribed
from vecd.workers.families.encoders import FAMILIES
from vecd.workers.processor import has_bfloat16

log = logging.getLogger("vecd.engine")

_MEASURED_TOKENS = 64
"""Enough to tell a model of millions of parameters from one of billions; 4 ms for all-MiniLM-L6-v2."""

SelectElsewhere: TypeAlias = Callable[[ReportProgress], Selection]
"""Makes the selection in another process. Raises ModelError."""


def load_engine(
    config: WorkerConfig, report: ReportProgress, select_elsewhere: SelectElsewhere | None = None
) -> Engine:
    """Build the engine of `config`, warm and compared with the reference model.

    The comparison is remembered in `config.cache_folder`; a remembered one is checked again with short probes. A new
    comparison runs in `select_elsewhere`, or in this process if that is None.

    Side effect: sets torch's number of threads, if the engine needs torch. Raises ModelError when the device cannot be
    used, or when the model cannot be loaded or cannot run the way `config` requires.
    """
    if config.is_dummy:
        report("making a dummy engine")
        card = config.card
        return DummyEngine(card.dim, card.hidden_size, is_normalized=card.is_normalized)
    if config.card.is_static:
        return _load_static(config, report)
    if config.device.startswith("cuda"):
        from vecd.workers.engines.torch import cuda

        cuda.describe(config.device)  # once here, where it is an error with a cause, and not a bug
    selection = recall(config)
    if selection is not None:
        try:
            return _build(config, selection, report)
        except Exception as error:  # whatever happened to the files, a new selection reports it better
            log.warning("the engine is selected anew: %s: %s", type(error).__name__, error)
            forget(config)
    selected = _select_lean(config, report)
    if selected is not None:
        selection, engine = selected
        _describe(config, engine, selection)
    elif select_elsewhere is not None:
        selection = select_elsewhere(report)
        engine = _build(config, selection, report)
    else:
        from vecd.workers.engines.torch.selection import select  # imports transformers

        selection, engine = select(config, report)
        _describe(config, engine, selection)
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
    return "lean" if is_lean_wanted(config) and recall_reference(config) is not None else None


def is_lean_wanted(config: WorkerConfig) -> bool:
    """Whether the lean engine comes first: float32 on a processor, for a family that a table describes. Without torch
    there is no other format."""
    if config.engine not in ("auto", "lean") or config.device != "cpu" or config.card.model_type not in FAMILIES:
        return False
    if config.engine == "lean" or config.dtype == "float32":
        return True
    return config.dtype == "auto" and not (has_bfloat16() and _has_torch())


def _load_static(config: WorkerConfig, report: ReportProgress) -> Engine:
    """A mean of rows has nothing to select: one engine, on the processor, in float32."""
    from vecd.workers.engines.static import StaticEngine

    report("mapping the table of embeddings")
    engine = StaticEngine(config.card)
    engine.facts[LOAD_TOKENS_PER_S] = _tokens_per_s(config, engine)
    if config.dtype not in ("auto", "float32"):
        engine.warnings.append(f"{config.dtype} is not available: static embeddings are computed in float32")
    return engine


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _select_lean(config: WorkerConfig, report: ReportProgress) -> tuple[Selection, Engine] | None:
    """Without torch: the lean engine, if it gives the model's remembered reference vectors."""
    reference = recall_reference(config) if is_lean_wanted(config) else None
    if reference is None:
        return None
    from vecd.workers.engines.lean.engine import LeanEngine

    report("comparing lean float32 with the remembered reference vectors")
    try:
        engine = LeanEngine(config.card)
        vectors = vectors_of(engine, reference.probes(config.card), config.card.dim)
    except NotDescribed as error:
        log.info("lean is not used: %s", error)
        return None
    parity = compare(vectors, reference.vectors)
    if not parity.is_within_bounds("float32"):
        log.warning("lean float32 is not used: its vectors are not the reference model's: %s", parity)
        return None
    engine.use_threads(config.num_threads)
    return Selection("lean", "float32", reference.figures(parity), reference.vectors), engine


def _build(config: WorkerConfig, selection: Selection, report: ReportProgress) -> Engine:
    """The engine of a selection, warm. Raises ModelError when its vectors are not those of the selection."""
    report(f"loading weights for {selection.path} {selection.dtype}")
    engine: Engine
    if selection.path == "lean":
        from vecd.workers.engines.lean.engine import LeanEngine

        engine = LeanEngine(config.card)
    else:
        from vecd.workers.engines.torch.build import build_engine

        engine = build_engine(config, selection.path, selection.dtype)
    engine.use_threads(config.num_threads)
    probes = short_probes(config.card)
    vectors = vectors_of(engine, probes, config.card.dim)
    parity = compare(vectors, selection.reference[: probes.lengths.size])
    if not parity.is_within_bounds(selection.dtype):
        raise ModelError(f"{config.card.folder}: the vectors are not the reference model's any more: {parity}")
    _describe(config, engine, selection)
    return engine


def _describe(config: WorkerConfig, engine: Engine, selection: Selection) -> None:
    engine.facts["agreement"] = selection.parity
    engine.facts[LOAD_TOKENS_PER_S] = _tokens_per_s(config, engine)
    engine.warnings = list(selection.warnings)


def _tokens_per_s(config: WorkerConfig, engine: Engine) -> float:
    """The speed of a warm engine with one short sequence: a first guess, until requests have been measured."""
    batch = random_batch(config.card, (_MEASURED_TOKENS,))
    started_at = time.perf_counter()
    vectors_of(engine, batch, config.card.dim)
    return float(batch.lengths.sum() / max(1e-6, time.perf_counter() - started_at))
