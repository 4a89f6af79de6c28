"""The rows that one generation of the configuration has computed, kept for the next request with the same input.

Owns what a row is found by (a digest of generation, model, output, tenant, token ids and border), and the counts of
hits and misses. `vecd.shm.vector_cache` has the table, and the argument why it never returns a wrong row.
"""

import struct
from hashlib import blake2b

import numpy as np

from vecd.gateway.config import GatewayConfig
from vecd.gateway.dispatch.delivery import deliver_vectors
from vecd.gateway.scheduling.queue import QueuedSequence
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.shm.output import Output
from vecd.shm.shared_metrics import Counter, Gauge
from vecd.shm.vector_cache import DIGEST_BYTES, VectorCacheMemory
from vecd.shm.views import Rows

_PURPOSE = b"vecd input"
"""Keeps these digests apart from whatever else is made with the same key."""
_SCOPE = struct.Struct("<qqBI")
"""Generation, model, output, and the length of the tenant's name, so that no two scopes begin alike."""
_BORDER = struct.Struct("<Bi")
"""Behind the token ids of a sequence of two parts. Not a whole number of token ids, so that it is not taken for one."""


class VectorCache:
    """The cache of one generation. Neither asked nor filled unless it is active."""

    def __init__(
        self, config: GatewayConfig, generation: int, shared: VectorCacheMemory, shared_metrics: SharedMetrics
    ) -> None:
        self.is_active = False
        self.shared = shared
        self._generation, self._model, self._dim = generation, config.model_index, config.card.dim
        self._row_nbytes = 4 * self._dim
        self._is_shared_by_tenants = config.share_computed == "all"
        self._shared_metrics = shared_metrics

    def activate(self) -> None:
        """Begin without a row, in place of the model's generation before, which is to be made inactive. The rows of
        that one are forgotten where no other model has any; else they stay until others replace them."""
        self.is_active = True
        if self.shared.activate(self._model, self._dim):
            self._shared_metrics.set(Gauge.VECTOR_CACHE_BYTES, 0)

    def deliver_known(self, sequences: list[QueuedSequence], output: Output, tenant: str) -> list[QueuedSequence]:
        """Deliver the rows that are known of sequences of one request; returns the sequences that are to be computed.
        Side effect: these have a digest from now on, under which `keep` keeps their rows."""
        table = self.shared.table
        if table is None or not self.is_active:
            return sequences
        name = b"" if self._is_shared_by_tenants else tenant.encode()
        scope = _SCOPE.pack(self._generation, self._model, output, len(name)) + name
        empty = blake2b(scope, digest_size=DIGEST_BYTES, key=self.shared.key, person=_PURPOSE)
        unknown: list[QueuedSequence] = []
        known: list[QueuedSequence] = []
        rows: list[bytes] = []
        for sequence in sequences:
            hasher = empty.copy()
            hasher.update(sequence.token_ids)
            if sequence.border:
                hasher.update(_BORDER.pack(0, sequence.border))
            digest = hasher.digest()
            row = table.find(digest, self._row_nbytes)
            if row is None:
                sequence.digest = digest
                unknown.append(sequence)
            else:
                known.append(sequence)
                rows.append(row)
        if known:
            self._shared_metrics.add(Counter.VECTOR_CACHE_HITS, len(known))
            deliver_vectors(known, np.frombuffer(b"".join(rows), dtype="<f4").reshape(-1, self._dim))
        self._shared_metrics.add(Counter.VECTOR_CACHE_MISSES, len(unknown))
        return unknown

    def keep(self, sequences: list[QueuedSequence], rows: Rows) -> None:
        """Store the rows (float32 [n, dim], C-contiguous, finite) of sequences, one of each, that have a digest."""
        table = self.shared.table
        if table is None or not self.is_active:
            return
        num_stored = num_evicted = 0
        view, row_nbytes = rows.data.cast("B"), self._row_nbytes
        for index, sequence in enumerate(sequences):
            if sequence.digest is not None:
                row = view[index * row_nbytes : (index + 1) * row_nbytes]
                is_stored, is_for_another = table.put(sequence.digest, row)
                num_stored += is_stored
                num_evicted += is_for_another
        self._shared_metrics.add(Counter.VECTOR_CACHE_STORED, num_stored)
        self._shared_metrics.add(Counter.VECTOR_CACHE_EVICTED, num_evicted)
        self._shared_metrics.set(Gauge.VECTOR_CACHE_BYTES, table.nbytes_used)
