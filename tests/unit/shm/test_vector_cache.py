"""The table of the vector cache: what is found, what is evicted, and that nothing torn or wrong is ever returned."""

import mmap
import os
import random
from collections.abc import Callable
from hashlib import blake2b
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vecd.shm.vector_cache import DIGEST_BYTES, RowTable, VectorCacheMemory, VectorCacheSpec, create_vector_cache

DIM = 4
KEY = b"a key of a start"
NUM_WAYS = 8


class StoppedError(Exception):
    """The writer has died at this store."""


class Watched(mmap.mmap):
    """Memory that calls a function before each store."""

    before_store: Callable[[], None] = staticmethod(lambda: None)

    def __setitem__(self, place, value):
        self.before_store()
        super().__setitem__(place, value)


def spec_of(num_buckets: int, num_gateways: int = 1, dim: int = DIM) -> VectorCacheSpec:
    return VectorCacheSpec(VectorCacheSpec(0, num_gateways).least_nbytes(dim) * num_buckets, num_gateways)


class Tables:
    """The tables of all gateways over one memory. The clock counts uses."""

    def __init__(self, num_buckets: int = 1, num_gateways: int = 1, dim: int = DIM) -> None:
        self.spec = spec_of(num_buckets, num_gateways, dim)
        self.memory = Watched(-1, self.spec.nbytes)
        self.clock = count(1).__next__
        self.tables = [self.table(gateway, dim) for gateway in range(num_gateways)]

    def table(self, gateway: int, dim: int = DIM, key: bytes = KEY) -> RowTable:
        table = RowTable(VectorCacheMemory(self.memory, self.spec, gateway, key), dim, self.clock)
        table.clear()
        return table


def digest_of(number: int) -> bytes:
    """In the first bucket, of however many."""
    return bytes(8) + number.to_bytes(DIGEST_BYTES - 8, "big")


def row_of(number: int, dim: int = DIM) -> bytes:
    return number.to_bytes(4, "little") * dim


def test_a_row_is_found_by_every_gateway_and_stored_once():
    ours, theirs = Tables(num_gateways=2).tables
    assert ours.find(digest_of(1)) is None
    assert ours.put(digest_of(1), row_of(1)) == (True, False)
    assert ours.put(digest_of(1), row_of(2)) == (False, False)
    assert ours.find(digest_of(1)) == theirs.find(digest_of(1)) == row_of(1)
    assert theirs.find(digest_of(2)) is None
    assert (ours.nbytes_used, theirs.nbytes_used) == (32 + 2 * 8 + 4 * DIM, 0)


def kept_of(made: Tables) -> set[int]:
    """The numbers of the rows in the only bucket, read without a use."""
    directory = made.memory[: NUM_WAYS * DIGEST_BYTES]
    digests = (directory[at : at + DIGEST_BYTES] for at in range(0, len(directory), DIGEST_BYTES))
    return {int.from_bytes(digest[8:], "big") for digest in digests}


def test_the_row_that_was_not_used_for_longest_is_evicted():
    made = Tables()
    [table] = made.tables
    for number in range(1, NUM_WAYS + 1):
        assert table.put(digest_of(number), row_of(number)) == (True, False)
    for number in (1, 2, 4):
        assert table.find(digest_of(number)) == row_of(number)
    nbytes_used = table.nbytes_used
    evicted: list[int] = []
    for number in range(101, 109):
        before = kept_of(made)
        assert table.put(digest_of(number), row_of(number)) == (True, True)
        evicted += before - kept_of(made)
    assert evicted == [3, 5, 6, 7, 8, 1, 2, 4]
    assert all(table.find(digest_of(number)) == row_of(number) for number in range(101, 109))
    assert table.nbytes_used == nbytes_used == NUM_WAYS * made.spec.way_nbytes(DIM)


def test_a_use_by_another_gateway_keeps_a_row():
    ours, theirs = Tables(num_gateways=2).tables
    for number in range(1, NUM_WAYS + 1):
        ours.put(digest_of(number), row_of(number))
    assert theirs.find(digest_of(1)) == row_of(1)
    ours.put(digest_of(9), row_of(9))
    assert ours.find(digest_of(1)) == row_of(1)
    assert ours.find(digest_of(2)) is None


def test_what_a_gateway_clears_is_its_own():
    made = Tables(num_gateways=2)
    ours, theirs = made.tables
    ours.put(digest_of(1), row_of(1))
    theirs.put(digest_of(2), row_of(2))
    successor = made.table(0)
    assert (ours.find(digest_of(1)), theirs.find(digest_of(1))) == (None, None)
    assert successor.find(digest_of(2)) == row_of(2)
    assert successor.put(digest_of(1), row_of(1)) == (True, False)
    assert theirs.find(digest_of(1)) == row_of(1)


def test_a_row_of_another_geometry_or_key_is_not_found():
    made = Tables(num_buckets=8)
    [table] = made.tables
    table.put(digest_of(1), row_of(1))
    shared = VectorCacheMemory(made.memory, made.spec, 0, KEY)
    assert RowTable(shared, DIM).find(digest_of(1)) == row_of(1)
    for dim in (1, 2, DIM + 1, 2 * DIM):
        assert RowTable(shared, dim).find(digest_of(1)) is None
    assert RowTable(VectorCacheMemory(made.memory, made.spec, 0, b"another"), DIM).find(digest_of(1)) is None


def test_digests_that_lie_across_two_are_not_found():
    made = Tables()
    [table] = made.tables
    table.put(bytes(8) + b"\1" * 8, row_of(1))
    table.put(bytes(8) + b"\2" * 8, row_of(2))
    assert made.memory.find(b"\1" * 8 + bytes(8)) >= 0
    assert table.find(b"\1" * 8 + bytes(8)) is None


@pytest.mark.parametrize("num_stores", range(4))
def test_a_writer_that_dies_between_two_stores_leaves_the_old_row_or_none(num_stores):
    made = Tables(num_gateways=2)
    ours, theirs = made.tables
    for number in range(1, NUM_WAYS + 1):
        ours.put(digest_of(number), row_of(number))
    left = count(num_stores, -1).__next__

    def stop() -> None:
        if left() == 0:
            raise StoppedError

    made.memory.before_store = stop
    with pytest.raises(StoppedError):
        ours.put(digest_of(9), row_of(9))
    made.memory.before_store = lambda: None
    assert theirs.find(digest_of(9)) is None
    assert theirs.find(digest_of(1)) == (row_of(1) if num_stores == 0 else None)
    assert all(theirs.find(digest_of(n)) == row_of(n) for n in range(2, NUM_WAYS + 1))


def test_each_changed_byte_of_what_belongs_to_a_row_is_noticed():
    """All of a small table, byte by byte; what is no part of the row or its checksum changes nothing."""
    made = Tables()
    [table] = made.tables
    table.put(digest_of(1), row_of(1))
    num_missed = 0
    for at in range(made.spec.nbytes):
        byte = made.memory[at]
        made.memory[at] = byte ^ 1
        found = table.find(digest_of(1))
        assert found in (None, row_of(1))
        num_missed += found is None
        made.memory[at] = byte
    assert num_missed == 2 * DIGEST_BYTES + 4 * DIM


_STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(("put", "find", "find", "clear", "scribble")), st.integers(1, 30)),
    max_size=60,
)


@settings(deadline=None)
@given(_STEPS, st.integers(0, 2**32))
def test_whatever_is_found_is_the_row_of_its_digest(steps, seed):
    """Two gateways, one bucket; bytes are overwritten at random, also between the stores of a writer, while the other
    gateway reads."""
    made = Tables(num_gateways=2)
    dice = random.Random(seed)

    def scribble() -> None:
        at = dice.randrange(made.spec.nbytes)
        mmap.mmap.__setitem__(made.memory, at, dice.randrange(256))

    def interrupt() -> None:
        if dice.random() < 0.3:
            scribble()
        number = dice.randrange(1, 31)
        assert made.tables[dice.randrange(2)].find(digest_of(number)) in (None, row_of(number))

    made.memory.before_store = interrupt
    for gateway, step, number in steps:
        table = made.tables[gateway]
        match step:
            case "put":
                table.put(digest_of(number), row_of(number))
            case "find":
                assert table.find(digest_of(number)) in (None, row_of(number))
            case "clear":
                table.clear()
            case "scribble":
                scribble()


@given(
    st.integers(1, 8), st.integers(1, 40), st.integers(1, 4),
    st.lists(st.integers(0, 2**64), min_size=1, max_size=60, unique=True),
)  # fmt: skip
@settings(deadline=None)
def test_without_more_rows_than_ways_nothing_is_lost(num_gateways, num_buckets, dim, numbers):
    tables = Tables(num_buckets, num_gateways, dim).tables
    filled: dict[tuple[int, int], int] = {}
    kept: dict[bytes, bytes] = {}
    for number in numbers:
        digest = blake2b(number.to_bytes(9, "little"), digest_size=DIGEST_BYTES).digest()
        gateway = number % num_gateways
        place = gateway, int.from_bytes(digest[:8], "little") % tables[0].num_buckets
        filled[place] = filled.get(place, 0) + 1
        if filled[place] <= NUM_WAYS:
            assert tables[gateway].put(digest, digest[:4] * dim) == (True, False)
            kept[digest] = digest[:4] * dim
    for table in tables:
        assert {digest: table.find(digest) for digest in kept} == kept


def test_segments_fit_and_are_apart():
    for max_nbytes in (100_000, 1_000_003):
        for num_gateways in (1, 2, 3, 64):
            spec = VectorCacheSpec(max_nbytes, num_gateways)
            assert spec.nbytes <= max_nbytes
            assert spec.segment_nbytes % 64 == 0
            assert spec.num_buckets(DIM) * NUM_WAYS * spec.way_nbytes(DIM) <= spec.segment_nbytes
            least = spec.least_nbytes(384)
            assert VectorCacheSpec(least, num_gateways).num_buckets(384) == 1
            assert VectorCacheSpec(least - 1, num_gateways).num_buckets(384) == 0


def test_the_file_is_as_large_as_the_spec_says_and_mapped_by_each_gateway():
    spec = spec_of(3, num_gateways=2)
    fd = create_vector_cache(spec)
    try:
        assert os.fstat(fd).st_size == spec.nbytes
        ours, theirs = (RowTable(VectorCacheMemory.mapped(fd, spec, gateway, KEY), DIM) for gateway in range(2))
    finally:
        os.close(fd)
    ours.clear()
    ours.put(digest_of(1), row_of(1))
    assert theirs.find(digest_of(1)) == row_of(1)
