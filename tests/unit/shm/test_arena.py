import os

import numpy as np
import pytest

from vecd.shm.arena import ArenaSpec, create_arena
from vecd.shm.views import map_slots

SPEC = ArenaSpec(num_slots=2, rows_per_slot=4, dim=8)


@pytest.fixture
def arena_fd():
    fd = create_arena(SPEC)
    yield fd
    os.close(fd)


def test_what_the_worker_writes_the_gateway_reads(arena_fd):
    ours, theirs = map_slots(arena_fd, SPEC, writable=True), map_slots(arena_fd, SPEC, writable=False)
    ours[1][2] = np.arange(8)
    assert theirs[1][2].tolist() == list(range(8))
    assert not theirs[0].any(), "the other slot is another piece of memory"


def test_the_gateway_cannot_write(arena_fd):
    rows = map_slots(arena_fd, SPEC, writable=False)[0]
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 1


def test_nobody_can_truncate_an_arena(arena_fd):
    with pytest.raises(PermissionError):
        os.ftruncate(arena_fd, 0)


def test_the_views_outlive_the_descriptor():
    fd = create_arena(SPEC)
    rows = map_slots(fd, SPEC, writable=True)[0]
    os.close(fd)
    rows[0] = 7
    assert rows[0].sum() == 56


def test_an_arena_that_is_too_small_is_refused(arena_fd):
    with pytest.raises(ValueError, match="length"):
        map_slots(arena_fd, ArenaSpec(num_slots=3, rows_per_slot=4, dim=8), writable=False)
