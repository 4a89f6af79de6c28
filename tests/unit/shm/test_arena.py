import os

import numpy as np
import pytest

from vecd.shm.arena import ArenaSpec, create_arena
from vecd.shm.views import map_arena

SPEC = ArenaSpec(num_slots=2, rows_per_slot=4, dim=8)


@pytest.fixture
def arena_fd():
    fd = create_arena(SPEC)
    yield fd
    os.close(fd)


def test_what_the_worker_writes_the_gateway_reads(arena_fd):
    [ours], [theirs] = map_arena(arena_fd, SPEC, writable=True), map_arena(arena_fd, SPEC, writable=False)
    ours.rows[1][2] = np.arange(8)
    assert theirs.rows[1][2].tolist() == list(range(8))
    assert not theirs.rows[0].any(), "the other slot is another piece of memory"


def test_the_gateway_cannot_write(arena_fd):
    [slots] = map_arena(arena_fd, SPEC, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        slots.rows[0][0] = 1


def test_nobody_can_truncate_an_arena(arena_fd):
    with pytest.raises(PermissionError):
        os.ftruncate(arena_fd, 0)


def test_the_views_outlive_the_descriptor():
    fd = create_arena(SPEC)
    [slots] = map_arena(fd, SPEC, writable=True)
    [rows, _] = slots.rows
    os.close(fd)
    rows[0] = 7
    assert rows[0].sum() == 56


def test_an_arena_that_is_too_small_is_refused(arena_fd):
    with pytest.raises(ValueError, match="length"):
        map_arena(arena_fd, ArenaSpec(num_slots=3, rows_per_slot=4, dim=8), writable=False)
