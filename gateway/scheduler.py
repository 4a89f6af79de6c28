"""Decides which sequences go into the next batch. Pure: no clock, no socket, no task.

Owns the queue of sequences. Called by `gateway.dispatch` whenever a worker can take a batch; there is no timer and
no batching window, so batches grow with the load and a lone sequence leaves at once.

First in, first out, bounded by a token budget.
"""

from collections import deque
from collections.abc import Iterable

from gateway.request import Sequence


class Scheduler:
    def __init__(self, max_batch_tokens: int, max_batch_sequences: int) -> None:
        """A batch holds at most so many tokens (one longer sequence makes a batch of its own) and sequences."""
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_sequences = max_batch_sequences
        self._queue: deque[Sequence] = deque()
        self._queued_tokens = 0
        self._num_abandoned = 0

    @property
    def queued_tokens(self) -> int:
        """Tokens waiting, abandoned ones included."""
        return self._queued_tokens

    @property
    def queued_sequences(self) -> int:
        return len(self._queue)

    @property
    def has_full_batch(self) -> bool:
        """Whether what waits fills a whole batch: only then is one sent ahead to a busy worker."""
        return self._queued_tokens >= self._max_batch_tokens or len(self._queue) >= self._max_batch_sequences

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._queue.append(sequence)
            self._queued_tokens += sequence.num_tokens

    def put_back(self, sequences: list[Sequence]) -> None:
        """Queue sequences of a lost batch again, before all others and in their old order."""
        self._queue.extendleft(reversed(sequences))
        self._queued_tokens += sum(sequence.num_tokens for sequence in sequences)

    def note_abandoned(self, num_sequences: int) -> None:
        """A request is over of which at most so many sequences still wait.

        They are dropped when a batch is built; where none is being built, before they are half of the queue.
        """
        self._num_abandoned += num_sequences
        if 2 * self._num_abandoned > len(self._queue):
            self._queue = deque(sequence for sequence in self._queue if not sequence.is_abandoned)
            self._queued_tokens = sum(sequence.num_tokens for sequence in self._queue)
            self._num_abandoned = 0

    def next_batch(self, num_idle_workers: int) -> list[Sequence]:
        """Take the sequences of one batch; empty when nothing waits.

        What waits is divided among the idle workers, so that a small queue keeps all of them busy instead of
        filling one. Side effect: drops abandoned sequences.
        """
        share = -(-self._queued_tokens // max(1, num_idle_workers))
        budget = min(self._max_batch_tokens, share)
        batch: list[Sequence] = []
        tokens = 0
        while self._queue and len(batch) < self._max_batch_sequences:
            sequence = self._queue[0]
            over_budget = tokens + sequence.num_tokens > budget
            if batch and (over_budget or sequence.must_run_alone) and not sequence.is_abandoned:
                break
            self._queue.popleft()
            self._queued_tokens -= sequence.num_tokens
            if sequence.is_abandoned:
                continue
            batch.append(sequence)
            tokens += sequence.num_tokens
            if sequence.must_run_alone:
                break
        return batch
