"""The configuration of a worker, and the modules that are imported before it is forked.

Reads no environment variable and no file. Imports neither torch nor numpy, because the supervisor imports it.
"""

from dataclasses import dataclass

from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec
from vecd.workers.families import FUSED_FAMILIES

REFERENCE_FILE = "vecd-reference.json"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything a worker needs to know; equal for all workers except `device`."""

    card: ModelCard
    arena: ArenaSpec
    engine: str
    """"lean", "fused", "packed" or "padded"; "auto": the fastest of these with the reference model's vectors, within
    bounds; "dummy": no model, vectors made from the token ids alone for tests."""
    device: str
    """"cpu", or "cuda:0", "cuda:1", …"""
    dtype: str
    num_threads: int
    log_level: str
    cache_folder: str
    unverified: bool = False
    """Whether a model is served without a comparison where neither its reference vectors nor torch are there."""
    log_format: str = "text"
    max_threads: int = 1
    """The most cores that may be leased to a batch; 1: no leases. More than `num_threads` then, which is 1."""
    ordered_pair: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Token ids of a pair of texts, and of one that a reranker has to give a lower score; None: nothing is checked."""
    accept_unordered: bool = False
    dummy_ms_per_text: float = 0.0
    """Milliseconds that the dummy engine sleeps for each sequence of a batch."""

    @property
    def is_dummy(self) -> bool:
        return self.engine == "dummy"


# The modules that the fork server, or the zygote before it, imports so that workers need not.

ENGINES_WITHOUT_TORCH = {
    "lean": "vecd.workers.onnx.engine",
    "export": "vecd.workers.onnx.engine",
    "static": "vecd.workers.static",
}


def modules_to_preload(model_type: str, engine: str) -> list[str]:
    """The modules whose import takes most of a worker's start, in the order to import them. They are for the engines
    that need torch. Some may not exist in the installed versions. Measured on 2 cores: torch 1.5 s, transformers 2 s
    more, which a family with a fused path does not need."""
    torch_alone = ["torch", "safetensors.torch", "vecd.workers.torch.transformer"]
    if engine in ("auto", "lean", "fused") and model_type in FUSED_FAMILIES:
        return torch_alone
    # transformers' rule; a text model that is part of a larger one lives in the larger one's module.
    family = model_type.replace("-", "_").removesuffix("_text")
    return [
        *torch_alone,
        "transformers",
        f"transformers.models.{family}.modeling_{family}",
        "vecd.workers.torch.packed",
    ]
