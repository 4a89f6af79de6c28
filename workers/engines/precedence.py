"""Which engine comes first for a configuration, before anything is known of its speed.

Imports neither torch nor numpy, because the supervisor predicts by it what memory a model needs
(`vecd.launch.memory.footprint`). Called by that and by `vecd.workers.engines.load`.
"""

from vecd.workers.config import WorkerConfig
from vecd.workers.families.encoders import FAMILIES
from vecd.workers.installed import has_torch
from vecd.workers.processor import has_amx_int8, has_bfloat16


def is_lean_wanted(config: WorkerConfig) -> bool:
    """Whether the lean engine comes first: float32 or int8 on a processor, for a family that a table describes. Without
    torch there is no other engine. Of an ONNX export there is no other engine either."""
    card = config.card
    if card.export_file:
        return True
    if config.engine not in ("auto", "lean") or config.device != "cpu" or card.model_type not in FAMILIES:
        return False
    if card.score is not None and card.score.pair_template is not None and has_torch():
        return False  # only torch's engine computes once what all pairs of a request begin with
    if config.engine == "lean" or config.dtype == "float32":
        return True
    if config.dtype == "int8":
        return not (has_amx_int8() and has_torch())
    return config.dtype == "auto" and not (has_bfloat16() and has_torch())
