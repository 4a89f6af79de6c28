"""State dicts that torch has saved, and files that pretend to be some. What torch itself writes is read in
tests/process/workers/engines/torch/test_multi_vector.py."""

import io
import json
import os
import pickle
import random
import re
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vecd.shm.card import ModelError
from vecd.workers.linear_file import load_linear
from vecd.workers.plain_pickle import PickleError, load_state_dict

ROOT = "sparse_linear/"
WEIGHT = np.arange(6, dtype="<f4") / 7


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


def tensor(
    shape: tuple[int, ...] = (2, 3),
    strides: tuple[int, ...] = (3, 1),
    *,
    offset: int = 0,
    size: int = 6,
    key: str = "0",
    storage: bytes = b"ctorch\nFloatStorage\n",
) -> bytes:
    """The opcodes that torch writes for a tensor."""
    persistent_id = b"(" + text("storage") + storage + text(key) + text("cpu") + integer(size) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    arguments = persistent_id + integer(offset) + numbers(*shape) + numbers(*strides) + b"\x89" + hooks
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def state_dict(**tensors: bytes) -> bytes:
    items = b"".join(text(name) + made for name, made in tensors.items())
    return b"\x80\x02ccollections\nOrderedDict\n)R(" + items + b"u."


def archive(pickled: bytes, storages: dict[str, bytes] | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as made:
        made.writestr(ROOT + "data.pkl", pickled)
        made.writestr(ROOT + "byteorder", "little")
        for key, content in ({"0": WEIGHT.tobytes()} if storages is None else storages).items():
            made.writestr(f"{ROOT}data/{key}", content)
        made.writestr(ROOT + "version", "3\n")
    return file.getvalue()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sparse_linear.pt"


def refusal(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    with pytest.raises(PickleError) as caught:
        load_state_dict(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_state_dict(file):
    file.write_bytes(archive(state_dict(weight=tensor(), bias=tensor((2,), (1,), offset=4))))
    found = load_state_dict(file)
    assert list(found) == ["weight", "bias"]
    assert found["weight"].dtype == np.float32
    np.testing.assert_array_equal(found["weight"], WEIGHT.reshape(2, 3))
    np.testing.assert_array_equal(found["bias"], WEIGHT[4:])


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("HalfStorage", WEIGHT.astype("<f2").tobytes()),
        ("BFloat16Storage", (WEIGHT.view("<u4") >> 16).astype("<u2").tobytes()),
    ],
)
def test_shorter_floats(file, name, stored):
    made = tensor(storage=f"ctorch\n{name}\n".encode())
    file.write_bytes(archive(state_dict(weight=made), {"0": stored}))
    np.testing.assert_allclose(load_state_dict(file)["weight"], WEIGHT.reshape(2, 3), rtol=2**-7)


class Malicious:
    """What a pickle would call on loading."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_of_a_command_is_refused_and_not_made(file, tmp_path, protocol):
    mark = tmp_path / "ran"
    pickled = pickle.dumps({"weight": Malicious(os.system, f"touch {mark}")}, protocol)
    assert re.search("refuses|no use", refusal(file, archive(pickled)))
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.exists(), "the pickle is one that does harm"


@pytest.mark.parametrize(
    ("pickled", "named"),
    [
        (b"\x80\x02cbuiltins\neval\n" + text("1") + b"\x85R.", "builtins.eval"),
        (b"\x80\x04" + text("builtins") + text("eval") + b"\x93" + text("1") + b"\x85R.", "builtins.eval"),
        (b"\x80\x04" + b"(" + text("a") + b"t" + text("eval") + b"\x93.", "''"),
        (b"(S'true'\nios\nsystem\n.", "0x53"),
        (b"(" + text("true") + b"ios\nsystem\n.", "0x69"),  # INST
        (b"(cos\nsystem\n" + text("true") + b"o.", "os.system"),  # OBJ
        (b"\x80\x02\x82\x01.", "0x82"),  # EXT1
        (b"\x80\x02\x83\x01\x00.", "0x83"),  # EXT2
        (b"\x80\x02\x84\x01\x00\x00\x00.", "0x84"),  # EXT4
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "0x81"),  # NEWOBJ
        (b"\x80\x02ccollections\nOrderedDict\n" + text("a") + b"\x85R.", "collections.OrderedDict"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "_rebuild_tensor_v2"),
        (b"\x80\x02ctorch._utils\n_rebuild_parameter\n.", "_rebuild_parameter"),
        (b"\x80\x02ctorch\nLongStorage\n.", "torch.LongStorage"),
        (b"\x80\x06}.", "protocol 6"),
        (b"\x80\x02P1\n.", "0x50"),  # PERSID
        (b"\x80\x02" + text("storage") + b"Q.", "'storage'"),
        (b"\x80\x02(" + text("module") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x06tQ.", "FloatSt"),
        (b"\x80\x02(" + text("storage") + b"ccollections\nOrderedDict\n" + text("0") + text("c") + b"K\x06tQ.", "Orde"),
        (b"\x80\x02K\x01N" + b"b.", "attributes"),
        (b"\x80\x02Nh\x05.", "recalls"),
        (b"\x80\x02.", "left over"),
        (b"\x80\x02}}.", "left over"),
        (b"\x80\x02u.", "mark"),
        (b"\x80\x02}(" + text("a") + b"u.", "dictionary"),
        (b"\x80\x02}(K\x01K\x02u.", "key 1"),
        (b"\x80\x02K\x01.", "no dictionary"),
        (b"\x80\x02}" + text("weight") + b"K\x01s.", "'weight' is not a tensor"),
        (b"\x80\x02X\xff\xff\xff\xff.", "cut off"),
        (b"\x80\x02X\x01\x00\x00\x00\xff.", "UTF-8"),
        (b"\x80\x02cbuiltins", "cut off"),
        (b"", "cut off"),
        (b"\x80\x02" + b"K\x01" * 60_000 + b"K\x01" * 60_000, "opcodes"),
        (b"\x80\x02" + b"(" * 2_000_000, "1,048,576 bytes"),
        # A tuple that is nested without end, and one whose text would never end.
        (b"\x80\x02N" + b"\x85" * 50_000 + b"Q.", "a tuple"),
        (b"\x80\x02N" + b"q\x00h\x00\x86" * 60 + b")R.", "a tuple"),
    ],
)
def test_what_a_state_dict_has_no_use_for_is_refused(file, pickled, named):
    assert re.search(named, refusal(file, archive(pickled)))


@pytest.mark.parametrize(
    "made",
    [
        tensor((2, 4), (4, 1)),  # beyond the storage
        tensor((2, 3), (3, 1), offset=1),
        tensor((2, 3), (3, 1), offset=-1),
        tensor((-2, -3), (3, 1)),
        tensor((2, 3), (-3, 1)),
        tensor((2, 3), (0, 0)),
        tensor((1 << 30, 1 << 30), (0, 0)),
        tensor((3, 2), (1, 3)),
        tensor((2, 3), (1, 1)),
        tensor((2, 3), (1,)),
        tensor((0, 3), (3, 1)),
        tensor((1,) * 9, (1,) * 9),
        tensor(size=5),
        tensor(size=1 << 30),
        tensor(size=-6),
        tensor(key="1"),
        tensor(key="../../data.pkl"),
        tensor().replace(numbers(2, 3), b"K\x05"),
        tensor().replace(numbers(2, 3), b"(" + text("a") + text("b") + b"t"),
    ],
)
def test_lies_about_sizes_are_refused(file, made):
    refusal(file, archive(state_dict(weight=made)))


def test_many_tensors_of_one_storage_are_bounded(file, monkeypatch):
    monkeypatch.setattr("vecd.workers.plain_pickle.MAX_FILE_BYTES", 20_000)
    content = archive(
        state_dict(**{f"t{index}": tensor((4000,), (1,), size=4000) for index in range(3)}), {"0": bytes(16_000)}
    )
    assert "larger" in refusal(file, content)
    assert "20,000 bytes" in refusal(file, content + bytes(20_000))


def test_archives_that_torch_does_not_write_are_refused(file):
    good = state_dict(weight=tensor())
    assert "compressed" in refusal(file, archive(good, compression=zipfile.ZIP_DEFLATED))
    assert "zip" in refusal(file, good)
    assert "zip" in refusal(file, b"")
    assert "missing" in refusal(file, archive(good, {}))
    for name in ("/data.pkl", "../data.pkl", "a/../../data.pkl"):
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as written:
            written.writestr(name, good)
        assert "name" in refusal(file, made.getvalue())
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as written:
        written.writestr("a/data.pkl", good)
        written.writestr("b/data.pkl", good)
    assert "2 entries" in refusal(file, made.getvalue())


def test_entries_that_lie_about_where_they_are_are_refused(file):
    content = bytearray(archive(state_dict(weight=tensor())))
    entries = []
    at = content.find(b"PK\x01\x02")
    while at >= 0:
        entries.append(at)
        at = content.find(b"PK\x01\x02", at + 1)
    overlapping = bytearray(content)
    overlapping[entries[2] + 42 : entries[2] + 46] = overlapping[entries[0] + 42 : entries[0] + 46]
    assert "overlaps" in refusal(file, bytes(overlapping))
    huge = bytearray(content)
    huge[entries[2] + 20 : entries[2] + 28] = struct.pack("<II", 1 << 31, 1 << 31)
    assert "cut off" in refusal(file, bytes(huge))
    elsewhere = bytearray(content)
    elsewhere[entries[2] + 42 : entries[2] + 46] = struct.pack("<I", 3)
    assert "header" in refusal(file, bytes(elsewhere))


def test_a_file_of_very_many_entries_is_refused_before_the_library_reads_them(file, monkeypatch):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as written:
        for number in range(1001):
            written.writestr(str(number), b"")
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert "more than 1000 entries" in refusal(file, made.getvalue())


def test_files_cut_off_or_damaged_never_raise_anything_else(file):
    content = archive(state_dict(weight=tensor(), bias=tensor((2,), (1,))))
    for length in range(0, len(content), 7):
        refusal(file, content[:length])
    chance = random.Random(0)
    pickled = state_dict(weight=tensor(), bias=tensor((2,), (1,)))
    refused = 0
    for round_number in range(3000):
        damaged = bytearray(content if round_number % 3 == 0 else pickled)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged if round_number % 3 == 0 else archive(bytes(damaged)))
        try:
            found = load_state_dict(file)
        except PickleError:
            refused += 1
        else:
            assert all(isinstance(array, np.ndarray) and array.size <= 6 for array in found.values())
    assert refused > 1000


def test_a_linear_layer_of_another_shape_is_refused(file):
    file.write_bytes(archive(state_dict(weight=tensor(), bias=tensor((2,), (1,)))))
    weight, bias = load_linear(file, 2, 3)
    assert weight.shape == (2, 3)
    assert bias.shape == (2,)
    with pytest.raises(ModelError, match="should hold"):
        load_linear(file, 3, 2)
    with pytest.raises(ModelError, match="No such file"):
        load_linear(file.with_name("other.pt"), 2, 3)
    file.write_bytes(archive(b"\x80\x02cbuiltins\neval\n."))
    with pytest.raises(ModelError, match=r"sparse_linear\.pt: .*builtins\.eval"):
        load_linear(file, 2, 3)


def test_an_ordered_dict_with_metadata(file):
    """As nn.Module.state_dict() has it."""
    metadata = b"}" + text("_metadata") + b"ccollections\nOrderedDict\n)R" + b"sb."
    file.write_bytes(archive(state_dict(weight=tensor())[:-1] + metadata))
    assert list(load_state_dict(file)) == ["weight"]
    assert pickle.loads(pickle.dumps(OrderedDict())) == {}


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_a_linear_layer_of_a_type_that_numpy_lacks_is_refused(dtype, tmp_path):
    size = 2 if dtype == "BF16" else 1
    fields = {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}
    header = json.dumps({"bias": fields}).encode()
    path = tmp_path / "sparse_linear.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    # Where another package has taught numpy the type, it can be read, and the missing weight is what is wrong.
    with pytest.raises(ModelError, match=r"sparse_linear\.safetensors: (cannot be read|holds)"):
        load_linear(path, 1, 1)
