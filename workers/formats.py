"""Which number formats and engines may serve a configuration, and in which order they are tried.

Owns the rules that need no measurement. Whether a shorter format is worth its loss of precision is measured by
`vecd.workers.select`. Imports neither torch nor numpy, because the supervisor predicts by these rules what memory a
model needs.
"""

import math

from vecd.base.programs import has_torch
from vecd.model.card import ModelCard
from vecd.model.files import stored_tensors
from vecd.workers.config import WorkerConfig
from vecd.workers.families import FAMILIES
from vecd.workers.machine import available_mb, this_processor

PATHS = {
    "auto": ("lean", "fused", "packed", "padded", "unpadded"),
    "lean": ("lean",),
    "fused": ("fused",),
    "packed": ("packed",),
    "padded": ("padded", "unpadded"),
}
"""By `WorkerConfig.engine`: the engines to try, in this order. The first needs the least memory and starts first, and
has 0.9 to 1.7 times the speed of the second in float32."""

LARGEST_MEASURED = 2e9
"""Bytes of weights up to which formats are measured. The copies of a larger model may not fit beside each other, and
take long to load."""

_SERVED_SHARE, _COMPARED_SHARE = 0.8, 0.5
"""Of the available memory: what weights in float32 may take in an engine, and in the reference model, beside which an
engine is loaded."""


def formats_of(config: WorkerConfig) -> tuple[str, ...]:
    """The number formats to try on a processor, in this order. Of two that `is_measured`, the first is less exact, and
    is taken only if it is clearly faster. Raises ModelError for weights whose header cannot be read."""
    card, processor = config.card, this_processor()
    if card.export_file:
        return ("float32",)  # as far as the rules go; the export has its own
    if config.dtype != "auto":
        return ("int8", "float32") if config.dtype == "int8" else (config.dtype,)
    if config.engine == "lean" or not has_torch():
        return ("float32",)
    if card.weights_bytes > LARGEST_MEASURED:
        is_shorter = processor.is_fast_in_bfloat16 or not _fits(card, _SERVED_SHARE)
    else:
        is_shorter = processor.has_bfloat16
    return ("bfloat16", "float32") if is_shorter else ("float32",)


def is_measured(config: WorkerConfig) -> bool:
    """Whether the speed of two formats decides between them. int8, which is requested, is measured at any size."""
    is_small = config.dtype == "auto" and config.card.weights_bytes <= LARGEST_MEASURED
    return config.device == "cpu" and (is_small or config.dtype == "int8")


def reference_format(config: WorkerConfig, formats: tuple[str, ...]) -> str:
    """The format in which the reference model is computed: float32 wherever it fits beside an engine, or is to be
    served. Raises as `formats_of`."""
    shortest = next(each for each in formats if each != "int8")
    return "float32" if shortest == "float32" or _fits(config.card, _COMPARED_SHARE) else shortest


def is_lean_wanted(config: WorkerConfig) -> bool:
    """Whether the lean engine comes first: float32 or int8 on a processor, for a family that a table describes. Without
    torch, and of an ONNX export, there is no other engine."""
    card = config.card
    if card.export_file:
        return True
    if config.engine not in ("auto", "lean") or config.device != "cpu" or card.model_type not in FAMILIES:
        return False
    if card.shares_beginnings and has_torch():
        return False  # only torch's engine computes once what all pairs of a request begin with
    return formats_of(config)[0] in ("float32", "int8")


def _fits(card: ModelCard, share: float) -> bool:
    """Whether the weights take at most this share of the available memory in float32. Unknown memory is enough."""
    tensors = (tensor for path in card.weight_files for tensor in stored_tensors(path).values())
    num_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    available = available_mb() << 20
    return not available or 4 * num_parameters <= share * available
