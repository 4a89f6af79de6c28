"""From a configuration to the engine that was chosen for it, now or at an earlier start.

Owns the order: recall, build, check, and only where that does not give an engine: choose and remember. Called by
`vecd.workers.engine`.
"""

import logging
from collections.abc import Callable
from typing import TypeAlias

import torch

from vecd.shm.card import ModelError
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Report
from vecd.workers.engines.parity import compare, short_probes, vectors_of
from vecd.workers.engines.selection_cache import Selection, forget, recall, remember
from vecd.workers.engines.torch.build import build_engine
from vecd.workers.engines.torch.transformer import TransformerEngine

log = logging.getLogger("vecd.engine")

ChooseElsewhere: TypeAlias = Callable[[Report], Selection]
"""Makes the choice in another process. Raises ModelError."""


def load_chosen_engine(
    config: WorkerConfig, report: Report, choose_elsewhere: ChooseElsewhere | None
) -> TransformerEngine:
    """See `vecd.workers.engine.load_engine`."""
    torch.set_num_threads(config.num_threads)
    choice = recall(config)
    if choice is not None:
        try:
            return _built(config, choice, report)
        except Exception as error:  # whatever became of the files, choosing anew says it better
            log.warning("the engine that was chosen earlier is chosen anew: %s: %s", type(error).__name__, error)
            forget(config)
    if choose_elsewhere is not None:
        choice = choose_elsewhere(report)
        engine = _built(config, choice, report)
    else:
        from vecd.workers.engines.selection import choose  # imports transformers

        choice, engine = choose(config, report)
        _describe(engine, choice)
    remember(config, choice)
    return engine


def _built(config: WorkerConfig, choice: Selection, report: Report) -> TransformerEngine:
    """The engine of a choice, warm. Raises ModelError when its vectors are not what they were."""
    report(f"loading weights for {choice.path} {choice.dtype}")
    engine = build_engine(config, choice.path, choice.dtype)
    probes = short_probes(config.card)
    vectors = vectors_of(engine, probes, config.card.dim)
    parity = compare(vectors, choice.plain[: probes.lengths.size])
    if not parity.is_within_bounds(choice.dtype):
        raise ModelError(f"{config.card.folder}: the vectors are not the plain model's any more: {parity}")
    _describe(engine, choice)
    return engine


def _describe(engine: TransformerEngine, choice: Selection) -> None:
    engine.facts["agreement"] = choice.parity
    engine.warnings = list(choice.warnings)
