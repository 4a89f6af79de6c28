"""Whether a reranker gives a query's answer a higher score than a text about something else.

Owns the check, and what is said of a model that fails it. Called by `vecd.workers.engines.load` for models that get
their pairs through a template, with token ids from the configuration (`vecd.launch.config.ordered_pair`).
"""

import numpy as np

from vecd.shm.card import ModelError
from vecd.shm.output import Output
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine, PackedBatch
from vecd.workers.engines.parity import vectors_of


def check_order(config: WorkerConfig, engine: Engine) -> None:
    """Raises ModelError for a model that ranks the two pairs of `config` in the wrong order, unless they are accepted;
    then the engine gets a warning. `engine.facts["ranks_in_order"]` is what was found. Does nothing without pairs."""
    if config.ordered_pair is None:
        return
    sequences = [np.array(ids, dtype=np.int32) for ids in config.ordered_pair]
    lengths = np.array([ids.size for ids in sequences], dtype=np.int32)
    outputs = np.full(len(sequences), Output.SCORES, dtype=np.uint8)
    batch = PackedBatch(lengths, np.concatenate(sequences), outputs)
    better, worse = vectors_of(engine, batch, config.card.row_dim)[:, 0].tolist()
    engine.facts["ranks_in_order"] = better > worse
    if better > worse:
        return
    found = (
        f"the answer to a plain question gets the score {better:.4g}, and a text about something else {worse:.4g}: the "
        "template may be another model's"
    )
    if not config.accept_unordered:
        raise ModelError(f"{config.card.folder}: {found}; --accept-unordered serves it all the same")
    engine.warnings.append(f"--accept-unordered: {found}")
