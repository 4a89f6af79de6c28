"""The part of `vecd check` that needs torch, in a process of its own: load the engine, compare and measure it.

Owns the process, and the reasons for the selected path. It loads the engine as the fork server does; each computation
runs in a process forked from it, so its memory is a worker's and its crash becomes an error message.

The job "check". What is found is named "path", twice if texts are compared, "reference_file" and
"measurements": parts of the report, as JSON.
"""

import importlib.metadata
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vecd.base.files import JsonObject, load
from vecd.base.programs import not_installed
from vecd.model.card import ModelError
from vecd.model.files import source_of
from vecd.shm.output import Output
from vecd.workers.batch import Engine, ReportProgress
from vecd.workers.check.order import USED_MEMORY, Order
from vecd.workers.check.speed import in_worker, measure
from vecd.workers.check.vectors import (
    batch_of,
    compare_by_length,
    embed,
    library_of,
    our_rows,
    reference_model_vectors,
    refuse_not_finite,
    rows_of_texts,
)
from vecd.workers.config import REFERENCE_FILE, WorkerConfig
from vecd.workers.load import load_engine
from vecd.workers.machine import kilobytes, this_processor
from vecd.workers.parity import digest_of, recall_reference, write_reference
from vecd.workers.process.selection_process import SelectionProcess
from vecd.workers.select import Selection, Times, in_words, recall


def work(report: ReportProgress, **fields: Any) -> Iterator[tuple[str, Any]]:
    """Carry out an `Order`. Side effect on the process: logging."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    started_at = time.monotonic()
    order = load(Order, fields)

    report("reading the weights")
    refuse_not_finite(order.config.card)
    report("loading the model")
    is_remembered = recall(order.config) is not None
    engine, selecting_s = _load(order, order.config.dtype, report)
    path = {
        **_describe_path(order.config, engine),
        "outputs": _WORDS.get(order.config.card.main_output, "vectors"),
        "is_remembered": is_remembered,
        "choosing_s": selecting_s,
        "load_s": time.monotonic() - started_at - selecting_s,
        "shared_mb": kilobytes(Path("/proc/self/smaps_rollup"), "Pss") // 1024,
        "agreements": [],
        "not_compared": [],
    }
    yield "path", path
    if order.texts:
        _compare(order, engine, path, report)
        yield "path", path
    is_right = all(comparison["is_within_bounds"] for comparison in path["agreements"])
    if order.is_to_remember and is_right:
        yield "reference_file", _write_reference(order.config, report)
    if order.seconds and is_right:
        others, not_measured = _load_others(order, path["dtype"], report)
        measured = measure(order, [engine, *others], report)
        yield "measurements", {**measured, "not_measured": not_measured}


def _load(order: Order, dtype: str, report: ReportProgress) -> tuple[Engine, float]:
    """The engine in a dtype, and the seconds of its selection; 0 if it was recalled. Raises ModelError."""
    config, selecting_s = replace(order.config, dtype=dtype), 0.0  # type: ignore[arg-type]

    def select(report: ReportProgress) -> Selection:
        nonlocal selecting_s
        started_at = time.monotonic()
        with SelectionProcess(config) as process:
            selection = process.result(report)
        selecting_s = time.monotonic() - started_at
        return selection

    if config.device == "cpu":
        return load_engine(replace(config, num_threads=1), report, select), selecting_s
    return load_engine(config, report), 0.0


def _load_others(order: Order, served_dtype: str, report: ReportProgress) -> tuple[list[Engine], dict[str, str]]:
    """The engines of the other dtypes; for those that have none, why."""
    if order.config.device != "cpu":
        return [], {"others": "on GPUs the served type alone is measured"}
    engines: list[Engine] = []
    not_measured: dict[str, str] = {}
    for dtype in ("float32", "bfloat16", "int8"):
        if dtype == served_dtype:
            continue
        if dtype == "bfloat16" and not this_processor().has_bfloat16:
            not_measured[dtype] = "this processor does not compute it natively"
            continue
        report(f"loading the model in {dtype}")
        try:
            engine, _ = _load(order, dtype, report)
        except ModelError as error:
            not_measured[dtype] = str(error)
            continue
        if engine.facts["dtype"] == dtype:
            engines.append(engine)
        else:
            not_measured[dtype] = "; ".join(engine.warnings) or "the model has no path for it"
    return engines, not_measured


_WORDS = {Output.SCORES: "scores", Output.TOKEN_SCORES: "scores", Output.SPARSE: "sparse weights"}

# --- the path ---------------------------------------------------------------------------------------------------

_ATTENTION = {
    "lean": "ONNX Runtime's, over runs of texts of equal length",
    "fused": "SDPA over runs of texts of equal length",
    "packed": "SDPA over runs of texts of equal length, in the place of transformers' own",
    "export": "as the ONNX export has it, over texts of equal length",
    "padded": "transformers' own, with a mask over the padding",
    "unpadded": "transformers' own, over texts of equal length, without padding",
}


def _describe_path(config: WorkerConfig, engine: Engine) -> JsonObject:
    facts = engine.facts
    path, dtype = facts["path"], facts["dtype"]
    attention = _ATTENTION.get(path, "none")
    if path == "packed" and config.device != "cpu":
        attention = "torch's variable-length attention where the GPU has it, else SDPA"
    elif path == "fused" and dtype != "float32":  # Source: vecd.workers.torch.fused
        attention += "; oneDNN's kernels for long ones"
    return {
        "path": path,
        "dtype": dtype,
        "device": config.device + (f" ({facts['gpu']})" if "gpu" in facts else ""),
        "attention": attention,
        "reasons": [_why_path(config, path, dtype), _why_dtype(config, dtype, facts.get("times_ms") or {})],
        "refused": engine.warnings,
        "probes": facts.get("agreement") or {},
        "ranks_in_order": facts.get("ranks_in_order"),
    }


def _why_path(config: WorkerConfig, path: str, dtype: str) -> str:
    if config.engine != "auto":
        return f"--engine {config.engine} was given"
    if path == "static":
        return "static: the model is a table of rows, which has one engine"
    if path == "export":
        return "export: the weights are an ONNX export, which has one engine"
    if path in ("lean", "fused"):
        return f"{path}: the family {config.card.model_type} has it, and it agrees with the reference model"
    from vecd.workers.description import NotDescribed
    from vecd.workers.torch.transformer import build_engine

    not_fused = "fused is refused"
    try:
        build_engine(config, "fused", dtype)
    except NotDescribed as error:
        not_fused = str(error).splitlines()[0]
    rest = "it agrees with the reference model, and is the next in order" if path == "packed" else "packed is refused"
    return f"{path}: {not_fused}; {rest}"


def _why_dtype(config: WorkerConfig, dtype: str, times: Times) -> str:
    if times:
        return f"{dtype}: {in_words(times)}"
    if config.dtype != "auto":
        return f"{dtype}: --dtype {config.dtype} was given" + (", and is not available" * (dtype != config.dtype))
    if config.card.export_file:
        return f"{dtype}: the ONNX export has it"
    if dtype != "float32":
        return f"{dtype}: computed natively here, and it agrees with the reference model; too large to be measured"
    if config.device == "cpu" and not this_processor().has_bfloat16:
        return "float32: the processor does not compute bfloat16 natively"
    return "float32: a shorter type is refused, or not known to be faster"


# --- comparisons ------------------------------------------------------------------------------------------------


def _compare(order: Order, engine: Engine, path: JsonObject, report: ReportProgress) -> None:
    """With the reference model, and with sentence-transformers or transformers: fills these lists of `path`. Raises
    ModelError for rows that are not finite, and when the reference model cannot be run."""
    config, card = order.config, order.config.card

    def run(work: Callable[[], Any], stage: str) -> Any:
        report(stage)
        return in_worker(config, work)

    batch = batch_of(card, order.sequences, order.borders)

    def compare(against: str, ours: Any, theirs: Any, num_rows: list[int], output: Output) -> None:
        found = compare_by_length(ours, theirs, batch, num_rows, output, path["dtype"], path["probes"])
        path["agreements"].append({"against": against, "relative_diff": None, "same_order": None, **found})

    ours = run(lambda: embed(engine, card, batch), f"computing {len(order.texts)} texts")
    if not np.isfinite(ours).all():
        raise ModelError(f"{card.folder}: the {path['outputs']} of some texts contain nan or infinity")
    not_compared = path["not_compared"]
    if card.reference_card.export_file:
        not_compared.append("not compared with the reference model, because the folder lacks the weights for it")
        return
    if not card.is_static:
        dtype, on_cpu = _reference_dtype(order, path), replace(config, device="cpu")
        theirs = run(lambda: reference_model_vectors(on_cpu, dtype, batch), "comparing with the reference model")
        num_rows = batch.rows_of_each.tolist()
        compare(f"the reference model in {dtype}", ours, theirs, num_rows, card.main_output)
    if why := card.difference_elsewhere:
        not_compared.append(f"not compared with sentence-transformers, which {why}")
        return
    name, output = library_of(card)
    try:
        name = f"{name} {importlib.metadata.version(name)}"
        found = run(lambda: rows_of_texts(card, order.max_tokens, order.texts), f"comparing with {name}")
        same = [i for i, one in enumerate(found) if one.token_ids in (None, order.sequences[i])]
        if len(same) < len(found):
            not_compared.append(_other_token_ids(name, order, [one.token_ids for one in found]))
        if same:
            of_both, num_rows = our_rows(ours, card, batch, order.kept)
            ours_of_each = np.split(of_both, np.cumsum(num_rows)[:-1])
            of_both = np.concatenate([ours_of_each[i] for i in same])
            theirs = np.concatenate([found[i].rows for i in same])
            if theirs.shape != of_both.shape:
                raise ModelError(f"it has {len(theirs)} rows for these texts, vecd {len(of_both)}")
            batch = batch_of(card, [order.sequences[i] for i in same], [order.borders[i] for i in same])
            what = "" if output is card.main_output else " (dense vectors alone)"
            of_same = [num_rows[i] for i in same]
            compare(f"{name} in float32{what}", of_both, theirs, of_same, output)
    except importlib.metadata.PackageNotFoundError:
        not_compared.append(f"not compared with {name}, which is {not_installed(name)}")
    except ModelError as error:
        not_compared.append(f"not compared with {name}: {error}")


def _other_token_ids(name: str, order: Order, theirs: list[list[int] | None]) -> str:
    differing = [i for i, ids in enumerate(theirs) if ids not in (None, order.sequences[i])]
    first = differing[0]
    pairs = itertools.zip_longest(order.sequences[first], theirs[first] or [])
    place, (ours, other) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return (
        f"{name} makes other token ids of {len(differing)} of {len(theirs)} texts than tokenizer.json, by which vecd "
        f"goes; their {_WORDS.get(order.config.card.main_output, 'vectors')} are compared with the reference model "
        f"alone. Text {first + 1}, token {place + 1}: {_or_none(other)} there, {_or_none(ours)} here"
    )


def _or_none(token_id: int | None) -> str:
    return "none" if token_id is None else f"id {token_id}"


def _write_reference(config: WorkerConfig, report: ReportProgress) -> str:
    """Raises ModelError when the float32 reference vectors cannot be computed or written."""
    if config.card.reference_card.export_file:
        raise ModelError(f"{config.card.export_file}: an ONNX export has no weights to compute reference vectors from")
    reference, path = recall_reference(config), Path(source_of(config.card.folder)) / REFERENCE_FILE
    if reference is None:
        from vecd.workers.select import compute_reference

        report("computing the reference vectors in float32")
        on_cpu = replace(config, device="cpu")
        reference = in_worker(on_cpu, lambda: compute_reference(on_cpu))
    try:
        write_reference(reference, digest_of(config.card), path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror}") from error
    return str(path)


def _reference_dtype(order: Order, path: JsonObject) -> str:
    """float32, unless weights in a shorter type do not fit into memory in float32, here and in
    sentence-transformers."""
    dtype: str = path["dtype"]
    needed_mb = 2 * 4 * order.num_parameters >> 20
    if "float32" in (dtype, order.stored_dtype) or needed_mb < USED_MEMORY * order.available_mb - path["shared_mb"]:
        return "float32"
    return "bfloat16" if dtype == "int8" else dtype
