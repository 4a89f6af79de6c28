"""The configuration of a worker.

Owns `WorkerConfig`, composed by the supervisor and sent to the fork server as JSON. Reads no environment variable and
no file. Imports neither torch nor numpy, because the supervisor imports it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vecd.shm.arena import ArenaSpec
from vecd.shm.card import ModelCard

REFERENCE_FILE = "vecd-reference.json"
"""In a model's folder: `vecd.workers.engines.references`. It may come and go while the model is served."""


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
    """"auto", "float32", "bfloat16", "float16" or "int8"."""
    num_threads: int
    """Threads of one forward pass, unless cores are leased to it."""
    log_level: str
    cache_folder: str
    """The cache directory for the selection of an engine; empty for none."""
    unverified: bool = False
    """Whether a model is served without a comparison where neither its reference vectors nor torch are there."""
    log_format: str = "text"
    """A format of `vecd.shm.logs`."""
    max_threads: int = 1
    """The most cores that may be leased to a batch; 1: no leases. More than `num_threads` then, which is 1."""
    ordered_pair: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Token ids of a pair of texts, and of one that a reranker has to give a lower score; None: nothing is checked."""
    accept_unordered: bool = False
    """Whether a model that gives these the wrong order is served with a warning."""
    dummy_ms_per_text: float = 0.0
    """Milliseconds that the dummy engine sleeps for each sequence of a batch."""
    measures_short_texts: bool = False
    """Whether the first load measures the speed with short texts, for the number of gateways; takes half a second."""

    @property
    def is_dummy(self) -> bool:
        return self.engine in ("dummy", "weightless")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "WorkerConfig":
        pair = fields["ordered_pair"] and tuple(map(tuple, fields["ordered_pair"]))
        card, arena = ModelCard.from_json(fields["card"]), ArenaSpec(**fields["arena"])
        return cls(**{**fields, "card": card, "arena": arena, "ordered_pair": pair})
