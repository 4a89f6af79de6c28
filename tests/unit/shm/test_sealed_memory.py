"""A copy of a file stays what the file was when it was copied, and can be written by nobody."""

import os
from pathlib import Path

import pytest

from vecd.shm.sealed_memory import close_copy, copy_sealed, original_of


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
