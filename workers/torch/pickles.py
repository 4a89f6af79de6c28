"""Makes safetensors of the pickles in which torch has saved a model's weights.

Owns the call of torch's loader, with `weights_only`: it makes nothing but tensors, and refuses every other name in the
file. Its storages are mapped, so no file is in memory as a whole, unless torch before 1.6 wrote it. The file is written
here, and not by the library, which refuses tensors that share memory and copies all tensors at once.

Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

import fcntl
import json
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vecd.model.files import ModelError, is_whole, one_line
from vecd.shm.job import Report
from vecd.workers.torch.checkpoint import TYPES

_NAMES = {dtype: name for name, dtype in TYPES.items()}


def work(report: Report, pickles: Mapping[str, Sequence[str]]) -> None:
    """The job "unpickle"."""
    report("converting")
    convert(pickles)


def convert(pickles: Mapping[str, Sequence[str]]) -> None:
    """Write each file, a key of `pickles`, of the tensors of all pickles that it is made of. Another process that
    converts to the same folder is waited for, and what it has written is left. Raises ModelError, in one line."""
    for target, sources in pickles.items():
        path = Path(target)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not is_whole(path):
                    _write(path, {name: tensor for each in sources for name, tensor in _load(Path(each)).items()})
        except OSError as error:
            raise ModelError(f"{path.parent}: the converted weights cannot be written: {error.strerror}") from None


def _load(path: Path) -> dict[str, Tensor]:
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _refuse_compressed(path)
        with warnings.catch_warnings(action="ignore"):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except ModelError:
        raise
    except Exception as error:  # torch raises everything from KeyError to UnpicklingError, over several lines
        raise ModelError(f"{path}: {_why_refused(error)}") from None
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{path}: holds a {type(found).__name__}, should hold tensors by name")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelError(f"{path}: {name!r:.80} is a {type(tensor).__name__}, should be a tensor with a name")
        _refuse_unusual(path, name, tensor)
    return found


def _refuse_compressed(path: Path) -> None:
    """torch stores. A small file of this kind could fill the memory."""
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ModelError(f"{path}: is compressed, which torch does not do")


def _why_refused(error: Exception) -> str:
    text = str(error)
    if refused := re.search(r"GLOBAL (\S+)", text):
        return f"is a pickle that names {refused[1]}, which torch's safe loader refuses"
    reason = re.search(r"WeightsUnpickler error:\s*(.+)", text)
    return f"is not a pickle of weights: {reason[1] if reason else one_line(error)}"


def _refuse_unusual(path: Path, name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
        raise ModelError(f"{path}: {name} is {tensor.dtype} ({tensor.layout}), which safetensors has no place for")
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # a stride of 0 makes a small file as large as one likes
        raise ModelError(f"{path}: {name} has {tensor.nbytes:,} bytes, and fewer are stored")


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """By a rename, so no reader sees half a file. Raises ModelError if the disk has no room, and OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # without which transformers refuses it
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so each is aligned
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    free = shutil.disk_usage(path.parent).free
    if end > free:
        raise ModelError(f"{path.parent}: the converted weights have {end:,} bytes, and {free:,} are free")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.parent / "partial"  # the lock is held: one that was left behind is no one's
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                flat = tensors[name].detach().reshape(-1).contiguous()
                file.write(flat.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
