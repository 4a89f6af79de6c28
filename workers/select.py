"""Selects the engine of a worker: a number format, and the first engine that gives the reference model's vectors in it.

Owns the comparisons, the measurement that decides between two formats, the warnings about what was refused, and the
cache of selections. Which are tried, and in which order, is in `vecd.workers.formats`. Imports torch only for engines
and references that need it.
"""

import base64
import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.base.files import JsonObject, dump, load, read_json, write_json
from vecd.base.programs import NEEDS_TORCH, has_torch
from vecd.model.card import ModelCard, ModelError, export_files, one_line
from vecd.model.digests import stamp_of
from vecd.shm.output import Output
from vecd.workers.batch import Engine, PackedBatch, ReportProgress
from vecd.workers.config import REFERENCE_FILE, WorkerConfig
from vecd.workers.description import NotDescribed
from vecd.workers.formats import PATHS, formats_of, is_measured, reference_format
from vecd.workers.machine import cpuinfo
from vecd.workers.parity import (
    Reference,
    all_probes,
    compare,
    random_batch,
    recall_reference,
    remember_reference,
    short_probes,
    vectors_of,
    vectors_one_by_one,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# How fast engines of several number formats compute batches of several classes, and whether a format is worth it.
#
# The clock is that of the process, which computes with one thread, because other programs disturb it less.

Times: TypeAlias = dict[str, dict[str, float]]
"""By class and number format: milliseconds of the fastest of several batches."""

_CLASSES: dict[str, tuple[int, ...]] = {
    "1 x 12": (12,),
    "1 x 64": (64,),
    "8 x 59": (59,) * 8,
    "16 mixed": (6, 9, 12, 12, 15, 19, 23, 28, 35, 43, 54, 67, 84, 105, 140, 190),
}
"""Lengths in tokens: few rows, tens, hundreds; one run of equal lengths, and many."""

_BUDGET_S = 2.0
_ROUNDS = 9

WORTH = 1.1
"""How much faster than float32 another format must be, because it is less exact."""


def take_times(engines: Mapping[str, Engine], card: ModelCard, budget_s: float = _BUDGET_S) -> Times:
    """Measure engines, by their format, in turns and in about `budget_s`. A class that would take longer is left out,
    but not the first. Raises what an engine raises."""
    times: Times = {}
    ends_at = time.process_time() + budget_s
    s_per_token = 0.0
    for name, lengths in _CLASSES.items():
        batch = random_batch(card, lengths)
        num_tokens, left_s = int(batch.lengths.sum()), ends_at - time.process_time()
        if times and s_per_token * num_tokens * 2 > left_s:  # once to warm up, once for the clock
            break
        round_s = sum(_take_s(engine, batch, card.row_dim) for engine in engines.values())
        share_s = (ends_at - time.process_time()) / (len(_CLASSES) - len(times))
        rounds = range(max(1, min(_ROUNDS, int(share_s / max(1e-6, round_s)))))
        taken: dict[str, list[float]] = {dtype: [] for dtype in engines}
        for _ in rounds:
            for dtype, engine in engines.items():
                taken[dtype].append(_take_s(engine, batch, card.row_dim))
        times[name] = {dtype: max(1e-6, min(all_s)) * 1e3 for dtype, all_s in taken.items()}
        s_per_token = sum(map(min, taken.values())) / num_tokens
    return times


def _take_s(engine: Engine, batch: PackedBatch, dim: int) -> float:
    started_at = time.process_time()
    vectors_of(engine, batch, dim)
    return time.process_time() - started_at


def speed_of(times: Times, dtype: str) -> float:
    """How many times as fast as float32: the geometric mean of the classes."""
    ratios = [of_class["float32"] / of_class[dtype] for of_class in times.values()]
    return math.prod(ratios) ** (1 / len(ratios))


def in_words(times: Times) -> str:
    """For the log and reports; empty if nothing was measured."""
    found = []
    for dtype in next(iter(times.values()), {}):
        if dtype != "float32":
            classes = "; ".join(f"{name}: {ms[dtype]:.1f} against {ms['float32']:.1f} ms" for name, ms in times.items())
            found.append(f"{dtype} is {speed_of(times, dtype):.2f} times as fast as float32 ({classes})")
    return ", ".join(found)


# The selection of an engine, and its cache: a comparison made once is not repeated at every start.
#
# A selection holds for one set of model files, one version of this code and its libraries, one processor or
# accelerator, and one set of requested settings; anything else is another file.
#
#     <cache directory>/engines/<key>.json     written by a rename, so no reader sees half a file
#
# A selection holds the reference model's vectors. Each start computes a few of them again
# (`vecd.workers.parity`), so a wrong cache entry costs a second and never gives a wrong vector.

log = logging.getLogger("vecd.selection")

_FORMAT = 2
_LIBRARIES = ("torch", "transformers", "onnxruntime", "safetensors", "numpy")
# The variables by which libraries decide which instructions they use.
_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def _dump_rows(rows: NDArray[np.float32]) -> list[Any]:
    return [rows.shape, base64.b64encode(rows.astype("<f4").tobytes()).decode()]


def _load_rows(dumped: Any) -> NDArray[np.float32]:
    shape, values = dumped
    return np.frombuffer(base64.b64decode(values), dtype="<f4").reshape(shape).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Selection:
    path: str
    dtype: str
    parity: JsonObject
    reference: NDArray[np.float32] = field(metadata={"dump": _dump_rows, "load": _load_rows})
    """The reference model's vectors of all probes, [P, D]."""
    warnings: list[str] = field(default_factory=list)
    times: Times = field(default_factory=dict)


def recall(config: WorkerConfig) -> Selection | None:
    """The selection made under the same conditions, or None. Raises ModelError if the device cannot be used."""
    path = _file(config)
    try:
        return load(Selection, read_json(path)) if path else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        log.warning("%s cannot be read and is made anew: %s: %s", path, type(error).__name__, error)
        forget(config)  # otherwise the next call would warn again
        return None


def remember(config: WorkerConfig, selection: Selection) -> None:
    """Write the selection to the cache. If that fails, log a warning; each start then compares again."""
    path = _file(config)
    if path is None:
        return
    try:
        write_json(path, dump(selection))
    except OSError as error:
        log.warning("the selection of an engine cannot be remembered: %s", error)


def forget(config: WorkerConfig) -> None:
    path = _file(config)
    if path is not None:
        with suppress(OSError):
            path.unlink()


# --- the key ----------------------------------------------------------------------------------------------------


def _file(config: WorkerConfig) -> Path | None:
    if config.cache_dir is None:
        return None
    try:
        conditions = json.dumps(_conditions(config), sort_keys=True)
    except OSError:
        return None
    return config.cache_dir / "engines" / f"{hashlib.sha256(conditions.encode()).hexdigest()[:32]}.json"


def _conditions(config: WorkerConfig) -> JsonObject:
    return {
        "format": _FORMAT,
        "model": stamps(config),
        "card": dump(config.card),
        "requested": [config.engine, config.dtype, config.device.partition(":")[0]],
        "device": _device_name(config.device),
        "code": _digest_of_code(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }


def stamps(config: WorkerConfig) -> list[list[Any]]:
    """Values that change when a file changes, without reading it, because weights may have gigabytes. Raises OSError.
    They have the inode's change time, because image builders set the modification time to a constant."""
    card, folder = config.card, Path(config.card.folder)
    folders = {folder, Path(card.weights_folder), *(folder / step.path for step in card.all_steps if step.path)}
    paths = {path for each in folders for end in ("*.safetensors", "*.json") for path in each.glob(end)}
    paths |= {folder / step.file for step in card.all_steps if step.file}
    if card.export_file:
        paths.update(export_files(Path(card.export_file)))
    return [[str(path), *stamp_of(path)] for path in sorted(paths) if path.name != REFERENCE_FILE]


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _digest_of_code() -> str:
    """A digest of the sources: a changed engine needs a new comparison. Without sources only the version counts."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest() + metadata.version("vecd")


def _device_name(device: str) -> str:
    """The processor with its instruction sets, or the accelerator. Raises ModelError if that cannot be used."""
    if device.startswith("cuda"):
        from vecd.workers.torch import cuda

        return cuda.describe(device)
    return f"{cpuinfo('model name') or platform.processor()} {cpuinfo('flags|Features')}"


Found: TypeAlias = tuple[Selection, Engine]


def select(config: WorkerConfig, report: ReportProgress) -> Found:
    """The engine in the number format that is to serve, and the record of the selection. Of two formats that are
    measured, the less exact one is taken if it is clearly faster.

    Raises ModelError when the model cannot be loaded or run, or when no engine that `config` allows is within bounds.
    """
    selector = _Selector(config, report, is_lean_only=not has_others(config))
    found, refused = selector.select(_formats_of(config))
    if found is None:
        needed = "" if has_others(config) or config.card.export_file else f"; another engine {NEEDS_TORCH}"
        raise ModelError(f"{config.card.folder}: {'; '.join(refused)}{needed}")
    return found


def select_lean(config: WorkerConfig, report: ReportProgress) -> Found | None:
    """Like `select`, without torch: the lean engine, if the model's reference vectors are remembered and it gives them.
    None where they are not, or it does not, and there are other engines."""
    if not has_others(config):
        return select(config, report)
    if recall_reference(config) is None:
        return None
    found, refused = _Selector(config, report, is_lean_only=True).select(_formats_of(config))
    if found is None:
        log.info("%s", "; ".join(refused))
    return found


def compute_reference(config: WorkerConfig) -> Reference:
    """The model's float32 reference vectors, which are also remembered in the cache. Raises ModelError."""
    return _Selector(config, lambda stage: None, is_lean_only=False).reference("float32")


def has_others(config: WorkerConfig) -> bool:
    return has_torch() and not config.card.reference_card.export_file


def build(
    config: WorkerConfig, path: str, dtype: str, load: "Callable[[str], PreTrainedModel] | None" = None
) -> Engine:
    """The engine `path`. `load`: gives the transformers model in a format. Raises NotDescribed for a model without such
    an engine, ModelError for one that cannot be loaded, and whatever a model raises on a path not made for it."""
    if path in ("lean", "export"):
        from vecd.workers.onnx.engine import LeanEngine

        if config.device != "cpu" or dtype not in ("float32", "int8"):
            raise NotDescribed("the lean engine computes float32 and int8 on a processor")
        return LeanEngine(config.card, dtype=dtype, keeps_files=config.num_threads > 1)
    from vecd.workers.torch.transformer import build_engine

    return build_engine(config, path, dtype, load)


@dataclass
class _Selector:
    config: WorkerConfig
    report: ReportProgress
    is_lean_only: bool
    model: "PreTrainedModel | None" = None
    loaded_dtype: str = ""

    def select(self, formats: tuple[str, ...]) -> tuple[Found | None, list[str]]:
        """None if no engine is within bounds, and why each was refused."""
        if self.is_lean_only:
            reference = recall_reference(self.config)
            if reference is None and not self.config.unverified:
                raise ModelError(
                    f"{self.config.card.folder}: its reference vectors are not known, and "
                    f"{_why_not_computed(self.config)}, or serve it uncompared with --unverified"
                )
        else:
            reference = self.reference(reference_format(self.config, formats))
        found: list[Found] = []
        without_engine: list[str] = []
        for dtype in dict.fromkeys((*formats, "float32" if reference is None else reference.dtype)):
            refused: list[str] = []
            tried = (self._try(dtype, path, reference, refused) for path in self._paths(dtype))
            first = next((each for each in tried if each is not None), None)
            if first is None:
                without_engine += refused
                continue
            selection, engine = first
            found.append((replace(selection, warnings=[*without_engine, *selection.warnings]), engine))
            if not is_measured(self.config) or dtype == formats[-1]:
                break
        return (self._worth_it(*found) if len(found) > 1 else next(iter(found), None)), without_engine

    def reference(self, dtype: str) -> Reference:
        """Only float32 is remembered."""
        remembered = recall_reference(self.config) if dtype == "float32" else None
        if remembered is not None:
            return remembered
        card = self.config.card
        self.report("loading the reference model")
        probes = all_probes(card, sum(weight.numel() for weight in self._load(dtype).parameters()))
        self.report(f"embedding probes of up to {probes.lengths.max()} tokens with the reference model")
        try:
            from vecd.workers.torch.reference import reference_rows  # imports transformers

            vectors = reference_rows(self.config, dtype, self._load, probes)
        except Exception as error:
            raise ModelError(f"{card.folder}: the model cannot be run: {one_line(error)}") from error
        if not np.isfinite(vectors).all():
            raise ModelError(f"{card.folder}: the reference model's vectors in {dtype} contain nan or infinity")
        reference = Reference(tuple(probes.lengths.tolist()), vectors, dtype)
        if dtype == "float32":
            remember_reference(self.config, reference)
        return reference

    def _load(self, dtype: str) -> "PreTrainedModel":
        """Keeps only the last model, because each may be large."""
        if self.model is None or self.loaded_dtype != dtype:
            import torch

            from vecd.workers.torch.loading import load_model  # imports transformers, which takes seconds

            self.model = None
            device = torch.device(self.config.device)
            self.model, self.loaded_dtype = load_model(self.config.card, dtype, device), dtype
        return self.model

    def _paths(self, dtype: str) -> Iterator[str]:
        if self.config.card.export_file:
            yield "export"
            return
        for path in PATHS[self.config.engine]:
            is_lean = path == "lean"
            if dtype in ("float32", "int8") if is_lean else dtype != "int8" and not self.is_lean_only:
                yield path

    def _try(self, dtype: str, path: str, reference: Reference | None, refused: list[str]) -> Found | None:
        """None for an engine that is not within bounds. Adds to `refused`. Raises ModelError for int8 without one."""
        config, card = self.config, self.config.card
        how = "the reference model" if not self.is_lean_only else "the remembered reference vectors"
        self.report(f"comparing {path} {dtype} with {how}")
        try:
            engine = build(config, path, dtype, self._load)
            dtype = engine.facts["dtype"]  # an export has its own
            if reference is None:
                return _uncompared(config, engine), engine
            probes = random_batch(card, reference.lengths)
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
            if config.engine != path and not self.is_lean_only:
                return None
            why = one_line(error)
        except Exception as error:  # a model may raise anything on a path that it was not written for
            why = one_line(error)
        else:
            if parity.is_within_bounds(dtype):
                log.info("%s %s agrees with the reference model: %s", path, dtype, parity)
                return Selection(path, dtype, reference.figures(parity), reference.vectors, refused), engine
            if card.export_file:
                others = REFERENCE_FILE if card.reference_card.export_file else "the safetensors beside it"
                raise ModelError(f"{card.export_file}: its vectors are not those of {others}: {parity}")
            why = f"its vectors are not the reference model's: {parity}"
        refused.append(f"{path} {dtype} is not used: {why}")
        return None

    def _worth_it(self, shorter: Found, exact: Found) -> Found:
        name = shorter[0].dtype
        self.report(f"measuring {name} and float32")
        times = take_times({name: shorter[1], "float32": exact[1]}, self.config.card)
        log.info("%s", in_words(times))
        selection, engine = shorter if speed_of(times, name) >= WORTH else exact
        warnings = selection.warnings
        if selection.dtype != name and self.config.dtype != "auto":
            why = f"it is {speed_of(times, name):.2f} times as fast as float32 on this processor"
            warnings = [*warnings, f"{shorter[0].path} {name} is not used: {why}"]
        return replace(selection, times=times, warnings=warnings), engine


def _formats_of(config: WorkerConfig) -> tuple[str, ...]:
    if config.dtype != "auto" or not config.device.startswith("cuda"):
        return formats_of(config)
    import torch

    from vecd.workers.torch import cuda

    return ("bfloat16" if cuda.has_native_bfloat16(torch.device(config.device)) else "float16", "float32")


def _uncompared(config: WorkerConfig, engine: Engine) -> Selection:
    """A selection without a parity. Raises ModelError for vectors that are not finite, or that depend on what else is
    in a batch."""
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
    if config.card.export_file:
        return (
            f"an ONNX export has no weights to compute them from: copy {REFERENCE_FILE} from the folder that it was "
            "made of, where `vecd check --remember` writes it"
        )
    return "there is no torch to compute them: run `vecd check --remember` on it where torch is installed"


# Whether a reranker gives a query's answer a higher score than a text about something else.


def check_order(config: WorkerConfig, engine: Engine) -> None:
    """Raises ModelError for a model that ranks the two pairs of `config` in the wrong order; if that is accepted, the
    engine gets a warning. `engine.facts["ranks_in_order"]` is what was found."""
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
