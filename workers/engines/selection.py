"""Selects the engine of a worker: a number format, and the first engine that gives the reference model's vectors in it.

Owns the comparisons, the measurement that decides between two formats, and the warnings about what was refused. Which
formats and engines are tried, and in which order, is in `vecd.workers.engines.formats`. Imports torch only for engines
and references that need it: those need a second copy of the model, so on a processor they are computed in a process of
their own (`vecd.workers.process.selection_process`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vecd.shm.card import ModelCard, ModelError, one_line
from vecd.workers.config import REFERENCE_FILE, WorkerConfig
from vecd.workers.engine import Engine, ReportProgress
from vecd.workers.engines.formats import PATHS, formats_of, is_measured, reference_format
from vecd.workers.engines.parity import all_probes, compare, short_probes, vectors_of, vectors_one_by_one
from vecd.workers.engines.references import Reference, recall_reference, remember_reference
from vecd.workers.engines.selection_cache import Selection
from vecd.workers.engines.timing import Times, in_words, is_worth_it, speed_beside, take_times
from vecd.workers.families.description import NotDescribed
from vecd.workers.installed import NEEDS_TORCH, has_torch
from vecd.workers.processor import Processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("vecd.selection")

Measure: TypeAlias = Callable[[Mapping[str, Engine], ModelCard], Times]
Found: TypeAlias = tuple[Selection, Engine]


def select(
    config: WorkerConfig,
    report: ReportProgress,
    *,
    processor: Processor | None = None,
    measure: Measure = take_times,
) -> Found:
    """The engine in the number format that is to serve, and the record of the selection.

    Of two formats that are measured, the less exact one is taken if it is clearly faster. `processor`: the one that the
    rules are for, this one by default. `measure`: takes the times of engines by their format.

    Raises ModelError when the model cannot be loaded or run, or when no engine that `config` allows is within bounds.
    """
    found = _Selector(config, report, processor, measure, is_lean_only=not has_others(config)).select()
    assert found is not None, "None is for the lean engine alone"
    return found


def select_lean(config: WorkerConfig, report: ReportProgress, *, measure: Measure = take_times) -> Found | None:
    """Like `select`, without torch: the lean engine, if the model's reference vectors are remembered and it gives them.
    None where they are not, or it does not, and there are other engines."""
    return _Selector(config, report, None, measure, is_lean_only=True).select()


def compute_reference(config: WorkerConfig) -> Reference:
    """The model's float32 reference vectors, which are also remembered in the cache. Raises ModelError."""
    return _Selector(config, lambda stage: None, None, take_times, is_lean_only=False).reference("float32")


def has_others(config: WorkerConfig) -> bool:
    """Whether there are the other engines and the reference model. They need torch, and weights that it can load."""
    return has_torch() and not config.card.export_file


def build(
    config: WorkerConfig, path: str, dtype: str, load: "Callable[[str], PreTrainedModel] | None" = None
) -> Engine:
    """The engine `path`. `load`: gives the transformers model in a format. Raises NotDescribed for a model without such
    an engine, ModelError for one that cannot be loaded, and whatever a model raises on a path not made for it."""
    if path in ("lean", "export"):
        from vecd.workers.engines.lean.engine import LeanEngine

        if config.device != "cpu" or dtype not in ("float32", "int8"):
            raise NotDescribed("the lean engine computes float32 and int8 on a processor")
        return LeanEngine(config.card, dtype=dtype, keeps_files=config.num_threads > 1)
    from vecd.workers.engines.torch.build import build_engine

    return build_engine(config, path, dtype, load)


class _Selector:
    def __init__(
        self,
        config: WorkerConfig,
        report: ReportProgress,
        processor: Processor | None,
        measure: Measure,
        *,
        is_lean_only: bool,
    ) -> None:
        self._config = config
        self._report = report
        self._measure = measure
        self._is_lean_only = is_lean_only
        self._formats = _formats_of(config, processor)
        self._refused: list[str] = []
        """Of the format that is tried."""
        self._model: PreTrainedModel | None = None
        self._loaded_dtype = ""

    def select(self) -> Found | None:
        reference = self._reference()
        if reference is None and self._is_lean_only and has_others(self._config):
            return None
        compared_in = "float32" if reference is None else reference.dtype
        found: list[Found] = []
        refused: list[str] = []
        for dtype in dict.fromkeys((*self._formats, compared_in)):
            self._refused = []
            first = self._first(dtype, reference)
            if first is None:
                refused += self._refused
                continue
            selection, engine = first
            found.append((replace(selection, warnings=[*refused, *selection.warnings]), engine))
            if not is_measured(self._config) or dtype == self._formats[-1]:
                break
        if found:
            return found[0] if len(found) == 1 else self._worth_it(*found)
        if self._is_lean_only and has_others(self._config):
            log.info("%s", "; ".join(refused))
            return None
        needed = "" if has_others(self._config) or self._config.card.export_file else f"; another engine {NEEDS_TORCH}"
        raise ModelError(f"{self._config.card.folder}: {'; '.join(refused)}{needed}")

    # --- reference vectors ----------------------------------------------------------------------------------------

    def _reference(self) -> Reference | None:
        """None where it is not known, and is not to be computed here or cannot be. Raises ModelError where it cannot
        be and the model is not to be served without."""
        if not self._is_lean_only:
            return self.reference(reference_format(self._config, self._formats))
        known = recall_reference(self._config)
        if known is None and not has_others(self._config) and not self._config.unverified:
            raise ModelError(
                f"{self._config.card.folder}: its reference vectors are not known, and "
                f"{_why_not_computed(self._config)}, or serve it uncompared with --unverified"
            )
        return known

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
        reference = Reference(tuple(probes.lengths.tolist()), vectors, dtype)
        if dtype == "float32":
            remember_reference(self._config, reference)
        return reference

    def _load(self, dtype: str) -> "PreTrainedModel":
        """The model in `dtype`. Keeps only the last one, because each may be large."""
        if self._model is None or self._loaded_dtype != dtype:
            import torch

            from vecd.workers.engines.torch.loading import load_model  # imports transformers, which takes seconds

            self._model = None
            device = torch.device(self._config.device)
            self._model, self._loaded_dtype = load_model(self._config.card, dtype, device), dtype
        return self._model

    # --- engines --------------------------------------------------------------------------------------------------

    def _first(self, dtype: str, reference: Reference | None) -> Found | None:
        """The first engine in a format that is within bounds. Raises ModelError for int8 without an engine."""
        for path in self._paths(dtype):
            found = self._try(dtype, path, reference)
            if found is not None:
                return found
        return None

    def _paths(self, dtype: str) -> Iterator[str]:
        if self._config.card.export_file:
            yield "export"
            return
        for path in PATHS[self._config.engine]:
            is_lean = path == "lean"
            if dtype in ("float32", "int8") if is_lean else dtype != "int8" and not self._is_lean_only:
                yield path

    def _try(self, dtype: str, path: str, reference: Reference | None) -> Found | None:
        """None for an engine that is not within bounds; a warning may have been added."""
        config, card = self._config, self._config.card
        how = "the reference model" if not self._is_lean_only else "the remembered reference vectors"
        self._report(f"comparing {path} {dtype} with {how}")
        try:
            engine = build(config, path, dtype, self._load)
            dtype = engine.facts["dtype"]  # an export has its own
            if reference is None:
                return _uncompared(config, engine), engine
            probes = reference.probes(card)
            parity = compare(vectors_of(engine, probes, card.row_dim), reference.vectors, probes.span, card.main_output)
        except ModelError:
            raise
        except NotDescribed as error:
            if dtype == "int8":
                others = (
                    "--dtype auto, float32 and bfloat16 serve it" if has_torch() else f"another engine {NEEDS_TORCH}"
                )
                raise ModelError(
                    f"{card.folder}: the model has no engine for --dtype int8: {error}; {others}"
                ) from None
            # Without such a request nothing is wrong: no table describes most families.
            if config.engine == path or self._is_lean_only:
                self._refuse(dtype, path, one_line(error))
            return None
        except Exception as error:  # a model may raise anything on a path that it was not written for
            self._refuse(dtype, path, one_line(error))
            return None
        if not parity.is_within_bounds(dtype):
            if card.export_file:
                raise ModelError(f"{card.export_file}: its vectors are not those of {REFERENCE_FILE}: {parity}")
            self._refuse(dtype, path, f"its vectors are not the reference model's: {parity}")
            return None
        log.info("%s %s agrees with the reference model: %s", path, dtype, parity)
        return Selection(path, dtype, reference.figures(parity), reference.vectors, self._refused), engine

    def _refuse(self, dtype: str, path: str, why: str) -> None:
        self._refused.append(f"{path} {dtype} is not used: {why}")

    def _worth_it(self, shorter: Found, exact: Found) -> Found:
        """That of two formats which is to serve, by their speeds."""
        name = shorter[0].dtype
        self._report(f"measuring {name} and float32")
        times = self._measure({name: shorter[1], "float32": exact[1]}, self._config.card)
        log.info("%s", in_words(times))
        selection, engine = shorter if is_worth_it(times, name) else exact
        warnings = selection.warnings
        if selection.dtype != name and self._config.dtype != "auto":
            speed = speed_beside(times, name, "float32")
            why = f"it is {speed:.2f} times as fast as float32 on this processor"
            warnings = [*warnings, f"{shorter[0].path} {name} is not used: {why}"]
        return replace(selection, times=times, warnings=warnings), engine


def _formats_of(config: WorkerConfig, processor: Processor | None) -> tuple[str, ...]:
    if config.dtype != "auto" or not config.device.startswith("cuda"):
        return formats_of(config, processor)
    import torch

    from vecd.workers.engines.torch import cuda

    return ("bfloat16" if cuda.has_native_bfloat16(torch.device(config.device)) else "float16", "float32")


def _uncompared(config: WorkerConfig, engine: Engine) -> Selection:
    """A selection without a parity. Raises ModelError for vectors that are not finite, and for those of an engine that
    depend on what else is in a batch."""
    path, dtype = engine.facts["path"], engine.facts["dtype"]
    probes, row_dim = short_probes(config.card), config.card.row_dim
    vectors = vectors_of(engine, probes, row_dim)
    if not np.isfinite(vectors).all():
        raise ModelError(f"{config.card.folder}: the vectors contain nan or infinity")
    alone = compare(vectors, vectors_one_by_one(engine, probes, row_dim), probes.span, config.card.main_output)
    if not alone.is_within_bounds(dtype):
        raise ModelError(f"{config.card.folder}: a text has another vector in a batch than alone: {alone}")
    needed = "the model's own weights" if config.card.export_file else "torch"
    warning = f"--unverified: the vectors are not compared with the reference model's, which needs {needed}"
    return Selection(path, dtype, {}, np.empty((0, row_dim), np.float32), [warning])


def _why_not_computed(config: WorkerConfig) -> str:
    """Why the reference vectors are not computed, and what to do."""
    if config.card.export_file:
        return (
            f"an ONNX export has no weights to compute them from: copy {REFERENCE_FILE} from the folder that it was "
            "made of, where `vecd check --remember` writes it"
        )
    return "there is no torch to compute them: run `vecd check --remember` on it where torch is installed"
