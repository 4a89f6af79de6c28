"""Selects the engine of a worker: the fastest path and dtype that give the vectors of the reference model.

Owns the order in which paths and dtypes are tried, and the warnings about those that were refused. Needs transformers
and a second copy of the model where no reference vectors are remembered, so on a processor it runs in a process of its
own (`vecd.workers.process.selection_process`). Called by that process and by `vecd.workers.engines.load`.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vecd.shm.card import ModelError, one_line
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine, ReportProgress
from vecd.workers.engines.lean.engine import LeanEngine
from vecd.workers.engines.parity import all_probes, compare, vectors_of
from vecd.workers.engines.references import Reference, recall_reference, remember_reference
from vecd.workers.engines.selection_cache import Selection
from vecd.workers.engines.timing import fastest, in_words, take_times, why_slow
from vecd.workers.engines.torch import cuda
from vecd.workers.engines.torch.build import PATHS, build_engine
from vecd.workers.engines.torch.linear import has_native_bfloat16
from vecd.workers.families.description import NotDescribed
from vecd.workers.processor import has_amx_int8
from vecd.workers.weights import is_stored_as_float32, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("vecd.selection")

_RIVALS = {"float32": ("lean", "fused"), "bfloat16": ("fused", "packed"), "int8": ("lean", "fused")}
"""The paths that may be the fastest on a processor, by dtype."""

_SMALLEST, _LARGEST = 8e6, 2e9
"""Bytes of weights between which engines are measured. Below, a pass takes less than what surrounds it. Above, a
rival's second copy of the weights may not fit, and takes long to load."""


def select(config: WorkerConfig, report: ReportProgress) -> tuple[Selection, Engine]:
    """Return the first engine whose vectors are the reference model's within bounds, and the record of it.

    The reference vectors are computed in float32. If the weights are stored in a shorter type, they are computed in the
    first type to be tried instead, because float32 would take twice the memory; but not those of a model with scores
    of up to _LARGEST bytes, because scores have no bound that holds between any two computations in 16 bits.

    Raises ModelError when the model cannot be loaded or run, or when no path that `config` allows is within bounds.
    """
    return _Selector(config, report).select()


def compute_reference(config: WorkerConfig) -> Reference:
    """The model's float32 reference vectors, which are also remembered in the cache. Raises ModelError."""
    return _Selector(replace(config, dtype="float32"), lambda stage: None).reference("float32")


def dtypes_to_try(config: WorkerConfig) -> tuple[str, ...]:
    """The types to try, in order: the requested one; for "auto" the 16-bit type that the device computes natively,
    then float32. int8 is followed by those of "auto", because it may be slow here, or the model may have no path for
    it. The lean path has only float32 and int8."""
    if config.engine == "lean":
        return ("int8", "float32") if config.dtype == "int8" else ("float32",)
    if config.dtype == "int8":
        return ("int8", *dtypes_to_try(replace(config, dtype="auto")))
    if config.dtype != "auto":
        return (config.dtype,)
    if config.device.startswith("cuda"):
        return ("bfloat16" if cuda.has_native_bfloat16(torch.device(config.device)) else "float16", "float32")
    return ("bfloat16", "float32") if has_native_bfloat16() else ("float32",)


class _Selector:
    def __init__(self, config: WorkerConfig, report: ReportProgress) -> None:
        self._config = config
        self._report = report
        self._device = torch.device(config.device)
        self._dtypes = dtypes_to_try(config)
        self._warnings: list[str] = []
        self._model: PreTrainedModel | None = None
        self._loaded_dtype = ""

    def select(self) -> tuple[Selection, Engine]:
        config = self._config
        loadable = [dtype for dtype in self._dtypes if dtype != "int8"]
        has_room = config.card.score is not None and config.card.weights_bytes <= _LARGEST
        reference_dtype = "float32" if has_room or is_stored_as_float32(config.card) else loadable[0]
        reference = self.reference(reference_dtype)
        for dtype, path in self._candidates(reference_dtype):
            found = self._try(dtype, path, reference)
            if found is not None:
                return self._fastest(*found, reference)
        raise ModelError(f"{config.card.folder}: {'; '.join(self._warnings)}")

    def _candidates(self, reference_dtype: str) -> Iterator[tuple[str, str]]:
        # torch's int8 may use AMX. That is not measured, and stays the first where it is.
        int8_paths = ("fused", "lean") if has_amx_int8() else ("lean", "fused")
        for dtype in dict.fromkeys((*self._dtypes, reference_dtype)):
            paths = PATHS[self._config.engine]
            for path in paths if dtype != "int8" else [path for path in int8_paths if path in paths]:
                if path != "lean" or dtype in ("float32", "int8"):
                    yield dtype, path

    def reference(self, dtype: str) -> Reference:
        """The remembered reference vectors, or those that the plain model gives now. Only float32 is remembered."""
        remembered = recall_reference(self._config) if dtype == "float32" else None
        if remembered is not None:
            return remembered
        card = self._config.card
        self._report("loading the reference model")
        probes = all_probes(card, sum(weight.numel() for weight in self._load(dtype).parameters()))
        self._report(f"embedding probes of up to {probes.lengths.max()} tokens with the reference model")
        try:
            from vecd.workers.engines.torch.reference import reference_rows  # imports transformers

            vectors = reference_rows(self._config, dtype, self._load, probes)
        except Exception as error:
            raise ModelError(f"{card.folder}: the model cannot be run: {one_line(error)}") from error
        if not np.isfinite(vectors).all():
            raise ModelError(f"{card.folder}: the reference model's vectors in {dtype} contain nan or infinity")
        reference = Reference(tuple(probes.lengths.tolist()), vectors)
        if dtype == "float32":
            remember_reference(self._config, reference)
        return reference

    def _fastest(self, selection: Selection, engine: Engine, reference: Reference) -> tuple[Selection, Engine]:
        """The fastest engine in the dtype of `selection`: that one, or a rival."""
        card, dtype = self._config.card, selection.dtype
        size = sum(path.stat().st_size for path in weight_files(Path(card.weights_folder)))
        if self._config.engine != "auto" or self._device.type != "cpu" or not _SMALLEST <= size <= _LARGEST:
            return selection, engine
        found, num_warnings = {selection.path: (selection, engine)}, len(self._warnings)
        for path in _RIVALS.get(dtype, ()):
            # Without the reference model transformers is not loaded yet, which would take seconds.
            if path not in found and (path != "packed" or self._model is not None):
                rival = self._try(dtype, path, reference)
                if rival is not None:
                    found[path] = rival
        del self._warnings[num_warnings:]  # nobody lacks a rival
        if len(found) == 1:
            return selection, engine
        self._report(f"measuring {' and '.join(found)}")
        times = take_times({path: each for path, (_, each) in found.items()}, card)
        selection, engine = found[fastest(times)]
        log.info("%s", in_words(times))
        return replace(selection, times=times), engine

    def _try(self, dtype: str, path: str, reference: Reference) -> tuple[Selection, Engine] | None:
        """The engine, if its vectors are within bounds. None if not; a warning may have been added."""
        self._report(f"comparing {path} {dtype} with the reference model")
        try:
            engine = build_engine(self._config, path, dtype, self._load)
            card = self._config.card
            probes = reference.probes(card)
            vectors = vectors_of(engine, probes, card.row_dim)
            parity = compare(vectors, reference.vectors, probes.span, card.main_output)
        except ModelError:
            raise
        except NotDescribed as error:
            # Without such a request nothing is wrong: no table describes most families.
            if self._config.engine == path or dtype == "int8":
                self._refuse(dtype, path, one_line(error))
            return None
        except Exception as error:  # a model may raise anything on a path that it was not written for
            self._refuse(dtype, path, one_line(error))
            return None
        if not parity.is_within_bounds(dtype):
            self._refuse(dtype, path, f"its vectors are not the reference model's: {parity}")
            return None
        if (path, dtype) == ("lean", "int8") and (why := why_slow(card, engine, LeanEngine(card))):
            self._refuse(dtype, path, why)
            return None
        log.info("%s %s agrees with the reference model: %s", path, dtype, parity)
        return Selection(path, dtype, reference.figures(parity), reference.vectors, self._warnings), engine

    def _refuse(self, dtype: str, path: str, why: str) -> None:
        self._warnings.append(f"{path} {dtype} is not used: {why}")

    def _load(self, dtype: str) -> "PreTrainedModel":
        """The model in `dtype`. Keeps only the last one, because each may be large."""
        if self._model is None or self._loaded_dtype != dtype:
            from vecd.workers.engines.torch.loading import load_model  # imports transformers, which takes seconds

            self._model = None
            self._model, self._loaded_dtype = load_model(self._config.card, dtype, self._device), dtype
        return self._model
