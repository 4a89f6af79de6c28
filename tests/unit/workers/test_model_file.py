"""What is read of a file of a model is of the version that was opened, or an error."""

import os
from pathlib import Path

import pytest

from vecd.shm.card import ModelError
from vecd.workers.model_file import ModelFile

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path / "file"


@pytest.mark.parametrize("name", ["file", "other"])
def test_another_file_in_its_place_is_not_read(path: Path, name: str) -> None:
    file = ModelFile(path)
    if name == "other":
        path.with_name(name).write_bytes(CONTENT[::-1])
        path.with_name(name).rename(path)
    else:
        path.unlink()
    assert file.read(0, file.size).tobytes() == CONTENT
    assert file.read(1000, 3).tobytes() == CONTENT[1000:1003]
    assert file.read(7, 0).size == 0


@pytest.mark.parametrize("size", [0, 100, len(CONTENT)])
def test_a_file_that_was_written_to_is_an_error_unless_it_is_in_memory(path: Path, size: int) -> None:
    files = [ModelFile(path, in_memory=in_memory) for in_memory in (True, False)]
    before = path.stat()
    path.write_bytes(CONTENT[::-1][:size])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files[0].read(0, files[0].size).tobytes() == CONTENT
    for begin in (0, 10_000):
        with pytest.raises(ModelError, match="file: the file has changed since it was opened"):
            files[1].read(begin, 10)
