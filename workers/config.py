"""The configuration of a worker, and the modules that are imported before it is forked.

Reads no environment variable and no file. Imports neither torch nor numpy, because the supervisor imports it.
"""

from dataclasses import dataclass

from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec
from vecd.shm.settings import Settings
from vecd.workers.families import FUSED_FAMILIES

REFERENCE_FILE = "vecd-reference.json"


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Settings):
    """The settings of a model, with what they leave open decided, and what else its workers need. Equal for all of
    them except `device`. Has no key. Without `cache_dir`, nothing is remembered."""

    card: ModelCard
    arena: ArenaSpec
    device: str  # type: ignore[assignment]
    """"cpu", or "cuda:0", "cuda:1", …"""
    num_threads: int
    max_threads: int = 1
    """The most cores that may be leased to a batch; 1: no leases. More than `num_threads` then, which is 1."""
    ordered_pair: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Token ids of a pair of texts, and of one that a reranker has to give a lower score; None: nothing is checked."""

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
    torch_alone = ["torch", "vecd.workers.torch.transformer"]
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
