"""Which engine a worker runs: the fastest that gives the vectors of the plain model.

Owns the order in which paths and dtypes are tried, and what the operator is told of those that were refused. Imports
transformers, and needs a second copy of the model while it compares; so on a processor it runs in a process of its own
(`vecd.workers.engines.selection_process`). Called by that and by `vecd.workers.engines.load`.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from vecd.shm.card import ModelError
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import PackedBatch, Report
from vecd.workers.engines.parity import all_probes, compare, vectors_of, vectors_one_by_one
from vecd.workers.engines.selection_cache import Selection
from vecd.workers.engines.torch.build import PATHS, build_engine
from vecd.workers.engines.torch.fused import NotFusible
from vecd.workers.engines.torch.linear import has_native_bfloat16
from vecd.workers.engines.torch.loading import is_stored_as_float32, load_model, one_line
from vecd.workers.engines.torch.transformer import TransformerEngine

log = logging.getLogger("vecd.choice")


def choose(config: WorkerConfig, report: Report) -> tuple[Selection, TransformerEngine]:
    """The first engine whose vectors agree with the plain model's, and the record of it.

    The plain vectors are computed in float32; where the weights are not stored in float32, in the first type that is
    to be tried, because float32 would take twice the memory.

    Raises ModelError when the model cannot be loaded or run, or the path that `config` insists on disagrees.
    """
    return _Choosing(config, report).choose()


def dtypes_to_try(config: WorkerConfig) -> tuple[str, ...]:
    """The type asked for; for "auto" the 16-bit type that the device computes natively, then float32. These also
    follow int8, which only the fused path has."""
    if config.dtype == "int8":
        return ("int8", *dtypes_to_try(replace(config, dtype="auto")))
    if config.dtype != "auto":
        return (config.dtype,)
    if config.device.startswith("cuda"):
        return ("bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16", "float32")
    return ("bfloat16", "float32") if has_native_bfloat16() else ("float32",)


class _Choosing:
    def __init__(self, config: WorkerConfig, report: Report) -> None:
        self._config = config
        self._report = report
        self._device = torch.device(config.device)
        self._dtypes = dtypes_to_try(config)
        self._warnings: list[str] = []
        self._model: PreTrainedModel | None = None
        self._loaded_dtype = ""

    def choose(self) -> tuple[Selection, TransformerEngine]:
        config = self._config
        loadable = [dtype for dtype in self._dtypes if dtype != "int8"]
        plain_dtype = "float32" if is_stored_as_float32(config.card) else loadable[0]
        self._report("loading the plain model, to compare with")
        probes = all_probes(config.card, sum(weight.numel() for weight in self._load(plain_dtype).parameters()))
        self._report(f"embedding probes of up to {probes.lengths.max()} tokens with it")
        plain = self._embed_plainly(plain_dtype, probes)
        if not np.isfinite(plain).all():
            raise ModelError(
                f"{config.card.folder}: the plain model's vectors in {plain_dtype} contain nan or infinity"
            )
        for dtype, path in self._candidates(plain_dtype):
            self._report(f"comparing {path} {dtype} with it")
            found = self._try(dtype, path, probes, plain)
            if found is not None:
                return found
        raise ModelError(f"{config.card.folder}: {'; '.join(self._warnings)}")

    def _candidates(self, plain_dtype: str) -> Iterator[tuple[str, str]]:
        for dtype in dict.fromkeys((*self._dtypes, plain_dtype)):
            for path in PATHS[self._config.engine] if dtype != "int8" else ("fused",):
                yield dtype, path

    def _embed_plainly(self, dtype: str, probes: PackedBatch) -> NDArray[np.float32]:
        try:
            engine = build_engine(self._config, "padded", dtype, self._load)
            return vectors_one_by_one(engine, probes, self._config.card.dim)
        except Exception as error:
            raise ModelError(f"{self._config.card.folder}: the model cannot be run: {one_line(error)}") from error

    def _try(
        self, dtype: str, path: str, probes: PackedBatch, plain: NDArray[np.float32]
    ) -> tuple[Selection, TransformerEngine] | None:
        """The engine, if it agrees; otherwise a warning has been noted."""
        try:
            engine = build_engine(self._config, path, dtype, self._load)
            parity = compare(vectors_of(engine, probes, self._config.card.dim), plain)
        except ModelError:
            raise
        except NotFusible as error:
            # Otherwise nothing is wrong: most families have no fused path.
            if self._config.engine == path or dtype == "int8":
                self._refuse(dtype, path, one_line(error))
            return None
        except Exception as error:  # whatever a model raises that was not made for this path
            self._refuse(dtype, path, one_line(error))
            return None
        if not parity.is_within_bounds(dtype):
            self._refuse(dtype, path, f"its vectors are not the plain model's: {parity}")
            return None
        log.info("%s %s agrees with the plain model: %s", path, dtype, parity)
        figures = {
            **parity.to_json(),
            "probes": probes.lengths.size,
            "longest_probe_tokens": int(probes.lengths.max()),
        }
        return Selection(path, dtype, figures, plain, self._warnings), engine

    def _refuse(self, dtype: str, path: str, why: str) -> None:
        self._warnings.append(f"{path} {dtype} is not used: {why}")

    def _load(self, dtype: str) -> PreTrainedModel:
        """The model in `dtype`; only one is kept, because each may be large."""
        if self._model is None or self._loaded_dtype != dtype:
            self._model = None
            self._model, self._loaded_dtype = load_model(self._config.card, dtype, self._device), dtype
        return self._model
