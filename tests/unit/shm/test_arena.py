"""Memory that two processes share, and copies of files that nobody can write."""

import os
from pathlib import Path

import numpy as np
import pytest

from vecd.shm.arena import ArenaSpec, close_copy, copy_sealed, create_arena, original_of
from vecd.shm.views import map_arena

SPEC = ArenaSpec(num_slots=2, rows_per_slot=4, dim=8)


@pytest.fixture
def arena_fd():
    fd = create_arena(SPEC)
    yield fd
    os.close(fd)


def test_what_the_worker_writes_the_gateway_reads_and_cannot_write(arena_fd):
    [ours], [theirs] = map_arena(arena_fd, SPEC, writable=True), map_arena(arena_fd, SPEC, writable=False)
    ours.rows[1][2] = np.arange(8)
    assert theirs.rows[1][2].tolist() == list(range(8))
    assert not theirs.rows[0].any(), "the other slot is another piece of memory"
    with pytest.raises(ValueError, match="read-only"):
        theirs.rows[0][0] = 1


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


def test_a_copy_keeps_what_is_overwritten_and_cannot_be_written(tmp_path: Path) -> None:
    (file := tmp_path / "tokenizer.json").write_text("loaded")
    copy = copy_sealed(str(file))
    file.write_text("another model")
    assert Path(copy).read_text() == "loaded"
    file.unlink()
    assert Path(copy).read_text() == "loaded"
    with pytest.raises(PermissionError), open(copy, "r+b") as written:
        written.write(b"x")
    assert original_of(copy) == str(file)
    close_copy(copy)
    assert not Path(copy).exists()
    close_copy(None)
    close_copy(str(file))  # no copy of this process


@pytest.mark.parametrize("name", ["", "x" * 200])
def test_a_long_path_keeps_its_end(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / (name or "f") / (name or "f")).mkdir(parents=True)
    (file := folder / "ranges.npy").touch()
    copy = copy_sealed(str(file))
    assert str(file).endswith(original_of(copy))
    assert original_of(copy).endswith("/ranges.npy")
    close_copy(copy)


def test_what_is_no_copy_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "blob").touch()
    (link := tmp_path / "tokenizer.json").symlink_to("blob")
    assert original_of(str(link)) == str(link)
    assert original_of("/no/such/file") == "/no/such/file"
    with pytest.raises(FileNotFoundError):
        copy_sealed("/no/such/file")


def test_what_is_no_file_is_refused_at_once_and_left_closed(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    num_open = len(os.listdir("/proc/self/fd"))
    for path in (pipe, tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            copy_sealed(str(path))
    assert len(os.listdir("/proc/self/fd")) == num_open
