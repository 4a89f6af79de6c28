"""Which engine a worker runs: the fastest that gives the vectors of the plain one.

Owns the order in which paths are tried, and what the operator is told of those that were refused. Called by
`workers.engine.load_engine`.
"""

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from shm.card import ModelError
from workers.agreement import compare, probe_batch, vectors_of, vectors_one_by_one
from workers.config import WorkerConfig
from workers.engine import Report
from workers.engines.fused import FusedForward, NotFusible
from workers.engines.packed import PackedForward
from workers.engines.padded import PaddedForward, UnpaddedForward
from workers.engines.transformer import Forward, TransformerEngine
from workers.loading import is_stored_as_float32, load_model, one_line
from workers.pooling import load_head

_FORWARDS: dict[str, Callable[[PreTrainedModel, torch.device], Forward]] = {
    "fused": FusedForward,
    "packed": PackedForward,
    "padded": PaddedForward,
    "unpadded": UnpaddedForward,
}
_PATHS = {
    "auto": ("fused", "packed", "padded", "unpadded"),
    "fused": ("fused",),
    "packed": ("packed",),
    "padded": ("padded", "unpadded"),
}
"""By `WorkerConfig.engine`: what is tried, in this order."""


def choose_engine(config: WorkerConfig, report: Report) -> TransformerEngine:
    """Load the model and return the first engine whose vectors agree with the plain ones.

    The plain ones are computed in float32; where the weights are not stored in float32, in the type asked for, because
    float32 would take twice the memory. Side effect: sets torch's number of threads.

    Raises ModelError when the model cannot be loaded or run, or the path that `config` insists on disagrees.
    """
    torch.set_num_threads(config.num_threads)
    return _Choice(config, report).choose()


class _Choice:
    def __init__(self, config: WorkerConfig, report: Report) -> None:
        self._config = config
        self._report = report
        self._device = torch.device(config.device)
        self._probes = probe_batch(config.card)
        self._warnings: list[str] = []
        self._model: PreTrainedModel | None = None
        self._loaded_dtype = ""

    def choose(self) -> TransformerEngine:
        config = self._config
        plain_dtype = "float32" if is_stored_as_float32(config.card) else config.dtype
        self._report("loading weights")
        self._head = load_head(config.card, self._device)
        self._load(plain_dtype)
        self._embed_plainly(plain_dtype)
        for dtype, path in self._candidates(plain_dtype):
            self._report(f"comparing {path} {dtype} with the plain model")
            engine = self._try(dtype, path)
            if engine is not None:
                engine.warnings = self._warnings
                return engine
        raise ModelError(f"{config.card.folder}: {'; '.join(self._warnings)}")

    def _candidates(self, plain_dtype: str) -> Iterator[tuple[str, str]]:
        for dtype in dict.fromkeys((self._config.dtype, plain_dtype)):
            for path in _PATHS[self._config.engine]:
                yield dtype, path

    def _embed_plainly(self, dtype: str) -> None:
        self._report("embedding probes with the plain model")
        try:
            self._plain = vectors_one_by_one(self._engine(dtype, "padded"), self._probes, self._config.card.dim)
        except Exception as error:
            raise ModelError(f"{self._config.card.folder}: the model cannot be run: {one_line(error)}") from error

    def _try(self, dtype: str, path: str) -> TransformerEngine | None:
        """The engine, if it agrees; otherwise a warning has been noted."""
        try:
            engine = self._engine(dtype, path)
            agreement = compare(vectors_of(engine, self._probes, self._config.card.dim), self._plain)
        except ModelError:
            raise
        except NotFusible as error:
            if self._config.engine == path:  # otherwise nothing is wrong: most families have no fused path
                self._refuse(dtype, path, one_line(error))
            return None
        except Exception as error:  # whatever a model raises that was not made for this path
            self._refuse(dtype, path, one_line(error))
            return None
        if not agreement.is_within_bounds(dtype):
            self._refuse(dtype, path, f"its vectors are not the plain model's: {agreement}")
            return None
        engine.facts["agreement"] = agreement.to_json()
        return engine

    def _refuse(self, dtype: str, path: str, why: str) -> None:
        self._warnings.append(f"{path} {dtype} is not used: {why}")

    def _engine(self, dtype: str, path: str) -> TransformerEngine:
        return TransformerEngine(_FORWARDS[path](self._load(dtype), self._device), self._head, dtype)

    def _load(self, dtype: str) -> PreTrainedModel:
        """The model in `dtype`; only one is kept, because each may be large."""
        if self._model is None or self._loaded_dtype != dtype:
            self._model = None
            self._model, self._loaded_dtype = load_model(self._config.card, dtype, self._device), dtype
        return self._model
