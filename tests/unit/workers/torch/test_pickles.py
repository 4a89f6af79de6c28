"""Pickled weights made into safetensors: the same tensors, or the file is refused by name."""

import collections
import fcntl
import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vecd.model.card import ModelError
from vecd.workers.torch.making import make_all

Tensors = dict[str, torch.Tensor]


def convert(target: Path, *sources: Path) -> None:
    make_all({str(target): {"how": "pickles", "sources": list(map(str, sources)), "options": {}}})


def make(folder: Path, *states: object, **settings: Any) -> Tensors:
    """The converted tensors of `states`, each saved as a pickle of its own."""
    sources = [folder / f"{index}.bin" for index in range(len(states))]
    for path, state in zip(sources, states, strict=True):
        torch.save(state, path, **settings)
    target = folder / "cache" / "made.safetensors"
    convert(target, *sources)
    assert {path.name for path in target.parent.iterdir()} == {"lock", "made.json", target.name}
    return load_file(target)


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


@pytest.mark.parametrize("is_archive", [True, False], ids=["", "before torch 1.6"])
def test_tensors_of_every_type_and_form(tmp_path: Path, is_archive: bool) -> None:
    torch.manual_seed(0)
    whole = torch.randn(6, 8)
    state = collections.OrderedDict({str(dtype): (100 * torch.randn(3, 5)).to(dtype) for dtype in DTYPES})
    state |= {
        "transposed": whole.T,
        "every second": whole[::2, ::2],
        "part": whole[2:4],
        "the same": whole,
        "tied": whole,
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "ünïcode": torch.ones(1),
    }
    assert_same(make(tmp_path, state, _use_new_zipfile_serialization=is_archive), state)


def test_shards_become_one_file(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(3, 2).state_dict(), {"other": torch.ones(2)}
    assert_same(make(tmp_path, first, second), {**first, **second})


def test_the_file_depends_on_the_tensors_alone(tmp_path: Path) -> None:
    state = {name: torch.full((3,), float(index)) for index, name in enumerate("cab")}
    for index, each in enumerate((state, dict(sorted(state.items())))):
        (tmp_path / str(index)).mkdir()
        make(tmp_path / str(index), each)
    files = [(tmp_path / str(index) / "cache/made.safetensors").read_bytes() for index in range(2)]
    assert files[0] == files[1]


class Runs:
    """What no file may make this process do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def compressed(path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def cut_off(path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])


def saved(value: object, **settings: Any) -> Callable[[Path], object]:
    return lambda path: torch.save(value, path, **settings)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "runs code": (saved({"a": Runs()}), "is a pickle that names posix.mkdir, which torch's safe loader refuses"),
    "runs code, old form": (
        saved({"a": Runs()}, _use_new_zipfile_serialization=False),
        "is a pickle that names posix.mkdir, which torch's safe loader refuses",
    ),
    "module": (saved(torch.nn.Linear(1, 1)), "is a pickle that names torch.nn.modules.linear.Linear, which torch's"),
    "nothing": (saved({}), "holds a dict, should hold tensors by name"),
    "list": (saved([torch.zeros(1)]), "holds a list, should hold tensors by name"),
    "nested": (saved({"state_dict": {"a": torch.zeros(1)}}), "'state_dict' is a dict, should be a tensor with a name"),
    "number as a name": (saved({1: torch.zeros(1)}), "1 is a Tensor, should be a tensor with a name"),
    "complex": (saved({"a": torch.zeros(1, dtype=torch.complex64)}), "a is torch.complex64 (torch.strided), which"),
    "sparse": (saved({"a": torch.eye(2).to_sparse()}), "a is torch.float32 (torch.sparse_coo), which safetensors has"),
    "larger than stored": (saved({"a": torch.zeros(1).expand(10**6)}), "a has 4,000,000 bytes, and fewer are stored"),
    "compressed": (compressed, "is compressed, which torch does not do"),
    "cut off": (cut_off, "is not a pickle of weights: "),
    "text": (lambda path: path.write_text("version 1"), "is not a pickle of weights: Unsupported operand 118"),
    "missing": (lambda path: None, "is not a pickle of weights: FileNotFoundError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_pickle_of_weights_is_refused_in_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write, why = REFUSED[name]
    path, target = tmp_path / "pytorch_model.bin", tmp_path / "cache/made.safetensors"
    write(path)
    with pytest.raises(ModelError) as caught:
        convert(target, path)
    assert str(caught.value).startswith(f"{path}: {why}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    assert [each.name for each in target.parent.iterdir()] == ["lock"]


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 1, 99))
    with pytest.raises(ModelError, match=r"cache: the converted weights have 400 bytes, and 99 are free"):
        make(tmp_path, {"a": torch.zeros(100)})


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(ModelError, match=r"cache: the converted weights cannot be written: File exists"):
        make(tmp_path, {"a": torch.zeros(1)})


def test_a_disk_that_fills_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ModelError, match="cannot be written: No space left on device"):
        make(tmp_path, {"a": torch.zeros(1)})
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


@pytest.mark.parametrize("length", [0, 60, -1])
def test_what_is_left_of_a_file_is_replaced(tmp_path: Path, length: int) -> None:
    state = {"a": torch.arange(100.0)}
    make(tmp_path, state)
    target = tmp_path / "cache/made.safetensors"
    target.write_bytes(target.read_bytes()[:length])
    (tmp_path / "cache/partial").write_text("of a process that was killed")
    assert_same(make(tmp_path, state), state)


def test_the_second_of_two_starts_takes_what_the_first_has_made(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found: list[Tensors] = []
        second = threading.Thread(target=lambda: found.append(make(tmp_path, {"a": torch.zeros(1)})))
        second.start()
        first = {"a": torch.ones(1)}
        save_file(first, tmp_path / "cache/made.safetensors")
        (tmp_path / "cache/made.json").write_text("{}")
    second.join()
    assert_same(found[0], first)
