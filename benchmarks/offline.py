"""What vecd's engine gives without a server around it: one process on each core, all of them busy at once.

Owns these processes, and the moment at which they all begin. Called by `benchmarks.compare`, which says how many texts
the server had in a batch; the texts are those that it was asked for.
"""

import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.cpu import Neighbours
from benchmarks.engine import ENVIRONMENT
from benchmarks.loads import MIXED, SHORT
from benchmarks.notebook import Offline
from benchmarks.ours import load_vecd
from benchmarks.servers import bundled_model
from benchmarks.workload import packed_batches
from vecd.client.bench.texts import Lengths, draw_texts
from vecd.model.card import read_card
from vecd.shm.views import Rows
from vecd.workers.batch import Engine, PackedBatch

_LENGTHS: Mapping[str, Lengths] = {"short": SHORT, "mixed": MIXED, "single": SHORT}
_NUM_TEXTS = {"short": 1024, "mixed": 128, "single": 64}
"""Few enough that a first pass through all of them takes about two seconds."""
_START_TIMEOUT_S = 180.0


class OfflineFailed(Exception):
    """Raised when an engine's process ends early or does not begin. It has said why on stderr."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one process has done of a work."""

    texts_per_s: float
    tokens_per_s: float
    batches_ms: Sequence[float]


def measure_offline(
    dtype: str, texts_per_batch: Mapping[str, int], duration_s: float, round_number: int, folder: Path
) -> Iterator[Offline]:
    """Yields a measurement for each work in `texts_per_batch`, and "single". Raises OfflineFailed.

    `folder` is for the engines' caches, in which they find next time what they have found out.
    Side effect: the processes are gone when this ends.
    """
    neighbours = Neighbours()
    cores = sorted(os.sched_getaffinity(0))
    works = {**texts_per_batch, "single": 1}
    shares = _run_processes(cores, dtype, works, duration_s, folder)
    for work, num_texts in works.items():
        of_work = [of_process[work] for of_process in shares if work in of_process]
        yield Offline(
            dtype=dtype,
            round=round_number,
            work=work,
            texts_per_batch=num_texts,
            texts_per_s=round(sum(share.texts_per_s for share in of_work), 2),
            tokens_per_s=round(sum(share.tokens_per_s for share in of_work), 1),
            p50_ms=round(statistics.median([ms for share in of_work for ms in share.batches_ms]), 3),
            others_cores=round(neighbours.cores(), 3),
        )


def _run_processes(
    cores: Sequence[int], dtype: str, works: Mapping[str, int], duration_s: float, folder: Path
) -> list[dict[str, _Share]]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(cores))
    processes, receivers = [], []
    try:
        for index, core in enumerate(cores):
            receiver, sender = context.Pipe(duplex=False)
            cache = folder / str(index)
            cache.mkdir(mode=0o700, exist_ok=True)
            arguments = (sender, barrier, core, index == 0, dtype, works, duration_s, cache)
            process = context.Process(target=_measure_pinned, args=arguments, daemon=True)
            process.start()
            sender.close()  # the process has its own, so that its end is the end of the pipe
            processes.append(process)
            receivers.append(receiver)
        return [_receive(receiver, _START_TIMEOUT_S + len(works) * 4 * duration_s) for receiver in receivers]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(receiver: Connection, timeout_s: float) -> dict[str, _Share]:
    try:
        if receiver.poll(timeout_s):
            shares: dict[str, _Share] = receiver.recv()
            return shares
    except EOFError as error:
        raise OfflineFailed("an engine's process has ended") from error
    raise OfflineFailed(f"an engine's process said nothing for {timeout_s:g} s")


def _measure_pinned(
    sender: Connection,
    barrier: Barrier,
    core: int,
    is_first: bool,
    dtype: str,
    works: Mapping[str, int],
    duration_s: float,
    cache: Path,
) -> None:
    os.sched_setaffinity(0, {core})
    os.environ.update(ENVIRONMENT)
    card = read_card(Path(bundled_model()))
    engine = load_vecd(card, dtype, cache)  # imports torch, which reads both then
    tokenizer = Tokenizer.from_file(str(Path(bundled_model()) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(card.max_tokens)
    shares = {}
    for work, num_texts in works.items():
        batches = make_batches(tokenizer, work, num_texts)
        rows = np.empty((num_texts, card.dim), np.float32)
        barrier.wait(_START_TIMEOUT_S)
        if work != "single" or is_first:  # one caller keeps one worker busy: the others leave it the machine
            shares[work] = _measure(engine, batches, rows, duration_s)
        barrier.wait(_START_TIMEOUT_S)
    sender.send(shares)


def _measure(engine: Engine, batches: Sequence[PackedBatch], rows: Rows, duration_s: float) -> _Share:
    """One batch after the other, as often as the time allows, after one round that is not counted: the engine prepares
    for each new size."""
    for batch in batches:
        engine.embed(batch, rows)
    num_texts = num_tokens = 0
    batches_ms: list[float] = []
    started = ended = time.perf_counter()
    for batch in itertools.cycle(batches):
        began = ended
        engine.embed(batch, rows)
        ended = time.perf_counter()
        batches_ms.append((ended - began) * 1e3)
        num_texts += len(batch.lengths)
        num_tokens += len(batch.token_ids)
        if ended - started >= duration_s:
            break
    elapsed_s = ended - started
    return _Share(num_texts / elapsed_s, num_tokens / elapsed_s, batches_ms)


def make_batches(tokenizer: Tokenizer, work: str, texts_per_batch: int) -> list[PackedBatch]:
    """The work's texts in the order in which they are drawn, so many a batch. The last ones make no smaller batch."""
    num_batches = max(1, _NUM_TEXTS[work] // texts_per_batch)
    texts = draw_texts(num_batches * texts_per_batch, _LENGTHS[work], seed=0)
    sequences = [tuple(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    starts = range(0, len(sequences), texts_per_batch)
    return [packed_batches(sequences[start : start + texts_per_batch], sys.maxsize)[0] for start in starts]
