"""Two processes on one vector cache: one stores and evicts all the time, the other reads and is never given a wrong
row."""

import multiprocessing
import os
import random
import time
from hashlib import blake2b

from vecd.shm.vector_cache import DIGEST_BYTES, RowTable, VectorCacheMemory, VectorCacheSpec, create_vector_cache

DIM = 256
KEY = b"a key of a start"
NUM_ROWS = 256
"""Eight times as many as the writer has ways, so that each is evicted again and again."""
NUM_READS = 200_000
DEADLINE_S = 60.0


def digest_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=DIGEST_BYTES).digest()


def row_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=64).digest() * (DIM * 4 // 64)


def write(fd: int, spec: VectorCacheSpec, seed: int) -> None:
    table = RowTable(VectorCacheMemory.mapped(fd, spec, 0, KEY), DIM)
    table.clear()
    dice = random.Random(seed)
    rows = [(digest_of(number), row_of(number)) for number in range(NUM_ROWS)]
    while True:
        table.put(*rows[dice.randrange(NUM_ROWS)])


def test_a_reader_is_never_given_a_wrong_row_by_a_writer_that_evicts_all_the_time():
    spec = VectorCacheSpec(VectorCacheSpec(0, 2).least_nbytes(DIM) * 4, 2)
    fd = create_vector_cache(spec)
    writer = multiprocessing.get_context("fork").Process(target=write, args=(fd, spec, 1), daemon=True)
    writer.start()
    try:
        table = RowTable(VectorCacheMemory.mapped(fd, spec, 1, KEY), DIM)
        table.clear()
        digests = [digest_of(number) for number in range(NUM_ROWS)]
        expected = [row_of(number) for number in range(NUM_ROWS)]
        dice, num_found, num_reads = random.Random(2), 0, 0
        deadline = time.monotonic() + DEADLINE_S
        while num_reads < NUM_READS or not num_found:
            assert time.monotonic() < deadline, (num_reads, num_found)
            number = dice.randrange(NUM_ROWS)
            row = table.find(digests[number])
            assert row is None or row == expected[number]
            num_found += row is not None
            num_reads += 1
        assert writer.is_alive()
        assert 0 < num_found < num_reads
    finally:
        writer.kill()
        writer.join()
        os.close(fd)
