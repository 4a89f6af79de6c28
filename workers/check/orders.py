"""What `vecd check` runs with torch, in processes of its own: the engine that would be served, and who it is compared
with.

Owns the orders that such a process takes and the answers that it gives. One process is one engine, as the fork server
has it; whatever is computed with it is computed in a process forked from that, as a worker is, so that its memory is a
worker's, and its crash an answer. Serves nobody: no gateway, no arena. Called by `vecd.launch.child`; the other end is
`vecd.launch.check.children`.

Orders come as JSON, one a line, on standard input: {"do": a method of `_Orders`, …its arguments}. To each the answers
are any number of {"stage": …} and at last {"result": …}, or {"error": …} with one line for the operator.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from vecd.shm.batch_limits import MAX_BATCH_TOKENS
from vecd.shm.card import ModelCard, ModelError
from vecd.workers.check.forks import WorkerDied, in_worker, in_workers
from vecd.workers.check.speed import Turn, pss_mb
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine, PackedBatch, Report, load_engine, set_num_threads
from vecd.workers.engines.selection_cache import Selection, recall
from vecd.workers.engines.selection_process import SelectionProcess
from vecd.workers.process.kernel import die_with_parent, leave_no_core, set_process_name, volunteer_for_oom_kill


def serve(orders: TextIO, answer_fd: int) -> int:
    """Obey until `orders` end; returns the exit code. Side effects on the process: it dies with its parent; name,
    logging, memory priority, no core file."""
    set_process_name("vecd-check")
    volunteer_for_oom_kill()
    leave_no_core()
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    with open(answer_fd, "w") as answers:

        def say(**answer: Any) -> None:
            print(json.dumps(answer), file=answers, flush=True)

        known = _Orders(lambda stage: say(stage=stage))
        while line := orders.readline():
            order = json.loads(line)
            if not die_with_parent(order.pop("parent_pid")):
                return 0
            try:
                say(result=getattr(known, order.pop("do"))(**order))
            except (ModelError, WorkerDied) as error:
                say(error=str(error))
    return 0


class _Orders:
    """Each public method is an order; they are given in an order that makes sense: `load` before what needs an engine.

    Sequences come as lists of token ids; vectors go into files, float32 [B, D], and never to the parent, which has no
    numpy.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._started_at = time.monotonic()
        self._config: WorkerConfig | None = None
        self._engine: Engine | None = None

    # --- the engine -------------------------------------------------------------------------------------------

    def load(self, config: dict[str, Any], choose_command: Sequence[str]) -> dict[str, Any]:
        """The engine of a configuration, chosen or recalled as the fork server does it. Times are since the process
        began, without the choice's."""
        self._config = chosen = WorkerConfig.from_json(config)
        is_remembered = recall(chosen) is not None
        choosing_s = 0.0

        def choose(report: Report) -> Selection:
            nonlocal choosing_s
            started_at = time.monotonic()
            with SelectionProcess(choose_command, chosen) as choosing:
                choice = choosing.result(report)
            choosing_s = time.monotonic() - started_at
            return choice

        on_processor = chosen.device == "cpu"
        one_thread = WorkerConfig.from_json({**config, "num_threads": 1}) if on_processor else chosen
        self._engine = load_engine(one_thread, self._report, choose if on_processor else None)
        return {
            "facts": self._engine.facts,
            "warnings": self._engine.warnings,
            "is_remembered": is_remembered,
            "load_s": time.monotonic() - self._started_at - choosing_s,
            "choosing_s": choosing_s,
            "shared_mb": pss_mb(),
            "not_fused": self._why_not_fused(),
        }

    def _why_not_fused(self) -> str:
        """Empty for a model that the fused path takes."""
        config, engine = self._loaded()
        if engine.facts["path"] == "fused" or config.engine not in ("auto", "fused"):
            return ""
        from vecd.workers.engines.torch.build import build_engine
        from vecd.workers.engines.torch.fused import NotFusible

        try:
            build_engine(config, "fused", engine.facts["dtype"])
        except NotFusible as error:
            return str(error).splitlines()[0]
        return ""

    def _loaded(self) -> tuple[WorkerConfig, Engine]:
        assert self._config is not None, "load comes first"
        assert self._engine is not None, "load comes first"
        return self._config, self._engine

    def native(self) -> dict[str, Any]:
        """The dtypes that this processor computes by instructions of its own."""
        from vecd.workers.engines.torch.linear import has_native_bfloat16, has_native_int8

        found = {"bfloat16": has_native_bfloat16(), "int8": has_native_int8()}
        return {"dtypes": ["float32", *(dtype for dtype, is_native in found.items() if is_native)]}

    def embed(self, sequences: list[list[int]], path: str) -> dict[str, Any]:
        """Write the engine's vectors of all sequences, which are one batch after the other, to `path`."""
        config, engine = self._loaded()

        def work() -> dict[str, Any]:
            set_num_threads(config)
            rows = _embed(engine, sequences, config.card.dim)
            np.save(path, rows)
            return {"has_all": bool(np.isfinite(rows).all())}

        return in_worker(work, may_fork=config.device == "cpu")

    def turn(self, num_workers: int, lengths: list[int], turn_s: float) -> dict[str, Any]:
        """Batches of sequences of these lengths, one after the other for `turn_s`, in so many workers at once: tokens a
        second of all together, the most memory that one of them had for itself, and the least part of a core."""
        config, engine = self._loaded()

        def begin() -> Callable[[], dict[str, Any]]:
            set_num_threads(config)
            turn = Turn(engine, config.card, lengths)
            return lambda: turn.run(turn_s)

        results = in_workers(begin, num_workers, may_fork=config.device == "cpu")
        return {
            "tokens_per_s": sum(result["tokens_per_s"] for result in results),
            "core_share": min(result["core_share"] for result in results),
            "private_mb": max(result["private_mb"] for result in results),
        }

    # --- what it is compared with -----------------------------------------------------------------------------

    def compare_plain(
        self, config: dict[str, Any], dtype: str, sequences: list[list[int]], vectors: str, vectors_dtype: str
    ) -> dict[str, Any]:
        """The plain model's vectors in `dtype`, one sequence at a time, against the file of `vectors`."""
        from vecd.workers.check.vectors import compare_by_length, plain_vectors

        worker = WorkerConfig.from_json(config)
        self._report("loading the plain model, to compare with")
        plain = plain_vectors(worker, dtype, sequences)
        lengths = [len(ids) for ids in sequences]
        return compare_by_length(np.load(vectors), plain, lengths, vectors_dtype)

    def compare_reference(
        self, folder: str, max_tokens: int, texts: list[str], lengths: list[int], vectors: str, vectors_dtype: str
    ) -> dict[str, Any]:
        """sentence-transformers' vectors in float32 against the file of `vectors`. `lengths`: tokens of each text."""
        from vecd.workers.check.vectors import compare_by_length, reference_vectors

        self._report("loading the model with sentence-transformers")
        theirs = reference_vectors(folder, max_tokens, texts)
        ours = np.load(vectors)
        if theirs.shape != ours.shape:
            raise ModelError(
                f"{folder}: sentence-transformers' vectors have {theirs.shape[1]} dimensions, vecd's {ours.shape[1]}"
            )
        return compare_by_length(ours, theirs, lengths, vectors_dtype)

    def scan(self, card: dict[str, Any]) -> dict[str, Any]:
        """Weights that are not finite, by name."""
        from vecd.workers.check.vectors import find_not_finite

        self._report("looking through the weights")
        facts = ModelCard.from_json(card)
        folders = [facts.weights_folder, *(str(Path(facts.folder) / step.path) for step in facts.steps if step.path)]
        return {"not_finite": find_not_finite(folders)}


def _embed(engine: Engine, sequences: list[list[int]], dim: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """In batches as they are served: of several lengths each, because that is where paths go wrong."""
    rows = np.full((len(sequences), dim), np.nan, dtype=np.float32)
    first = 0
    while first < len(sequences):
        last, num_tokens = first, 0
        while last < len(sequences) and (last == first or num_tokens + len(sequences[last]) <= MAX_BATCH_TOKENS):
            num_tokens += len(sequences[last])
            last += 1
        batch = packed(sequences[first:last])
        engine.embed(batch, rows[first:last])
        first = last
    return rows


def packed(sequences: list[list[int]]) -> PackedBatch:
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int32)
    return PackedBatch(lengths, np.concatenate([np.array(ids, dtype=np.int32) for ids in sequences]))
