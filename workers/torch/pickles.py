"""Reads the pickles in which torch has saved a model's weights.

Owns the call of torch's loader, with `weights_only`: it makes nothing but tensors, and refuses every other name in the
file. Its storages are mapped, so no file is in memory as a whole, unless torch before 1.6 wrote it.
"""

import re
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vecd.base.files import JsonMapping
from vecd.model.files import ModelError, one_line
from vecd.workers.torch.making import NAMES, Content, Planned


def read(sources: Sequence[Path], options: JsonMapping) -> Content:
    """The tensors of all of them. Raises ModelError, in one line."""
    return Content({name: Planned.of(tensor) for each in sources for name, tensor in _load(each).items()})


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
    if tensor.layout != torch.strided or tensor.dtype not in NAMES:
        raise ModelError(f"{path}: {name} is {tensor.dtype} ({tensor.layout}), which safetensors has no place for")
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # a stride of 0 makes a small file as large as one likes
        raise ModelError(f"{path}: {name} has {tensor.nbytes:,} bytes, and fewer are stored")
