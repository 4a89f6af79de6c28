"""Has the weights that a model has as pickles alone made into safetensors, and gives it a folder in which it has them.

Owns the folder `converted` in the cache directory, and which pickles are a model's weights. Reading a pickle can run
code of the file: it is done once, in a process of its own, by the loader of torch that makes nothing but tensors
(`vecd.workers.torch.pickles`).

    <cache directory>/converted/<digest>.safetensors       by the content of the pickles that it was made of
    <cache directory>/converted/<digest>/<model's folder>  links to these and to the model's other files

The second is the model's folder from there on. So every reader finds safetensors under their usual names, and none
knows of pickles: the engines, transformers, digests and what looks whether files have changed. As it ends with the path
of the model's own folder, that can be told of it (`source_of`), for messages and for what is written beside a model.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from vecd.base.programs import NEEDS_TORCH, has_torch
from vecd.model.digests import digest_of_file
from vecd.model.files import EXPORT, PICKLED_HEADS, ModelError, files_of, is_whole, shards
from vecd.model.steps import folders_without_safetensors
from vecd.shm.job import run_job
from vecd.workers.config import REFERENCE_FILE

_VERSION = "1"
_TIMEOUT_S = 3600.0
"""Of the conversion of one model: 14 GB from a disk of 10 MB/s take 25 minutes."""


def without_pickles(folder: Path, model: str, cache_folder: Path, report: Callable[[str], None]) -> Path:
    """The folder to read the model in `folder` from: itself, unless weights of it are pickles alone. `model` is its
    name for people. Raises ModelError for pickles that cannot be converted. Without torch, those that have an ONNX
    export beside them stay as they are. Side effect: files in the cache directory."""
    folder = folder.resolve()
    try:
        pickles = _pickles_of(folder)
        if not has_torch():
            pickles = {made: each for made, each in pickles.items() if not (made.parent / EXPORT).is_file()}
        cached = {made: cache_folder / "converted" / _name_of(each, cache_folder) for made, each in pickles.items()}
        missing = [made for made, file in cached.items() if not is_whole(file)]
        if missing:
            if not has_torch():
                raise ModelError(f"{pickles[missing[0]][0]}: a pickle, and making safetensors of it {NEEDS_TORCH}")
            report(f"converting the pickled weights of {model} to safetensors (once)")
            convert({str(cached[made]): list(map(str, pickles[made])) for made in missing})
        return _folder_of_links(folder, pickles, cached, cache_folder) if pickles else folder
    except OSError as error:
        raise ModelError(f"{error.filename or folder}: the pickled weights cannot be converted: {error}") from None


def _pickles_of(folder: Path) -> dict[Path, list[Path]]:
    """The safetensors that the model lacks, and the pickles that each is made of."""
    found: dict[Path, list[Path]] = {}
    for part in folders_without_safetensors(folder):
        single, index = part / "pytorch_model.bin", part / "pytorch_model.bin.index.json"
        if single.is_file():
            found[part / "model.safetensors"] = [single]
        elif index.is_file():
            found[part / "model.safetensors"] = shards(index, ".bin")
    for head in map(folder.joinpath, PICKLED_HEADS):
        if head.is_file() and not head.with_suffix(".safetensors").is_file():
            found[head.with_suffix(".safetensors")] = [head]
    return found


def _name_of(pickles: list[Path], cache_folder: Path) -> str:
    digests = (digest_of_file(path, cache_folder) for path in pickles)
    return f"{hashlib.sha256(' '.join((_VERSION, *digests)).encode()).hexdigest()[:32]}.safetensors"


def convert(pickles: Mapping[str, list[str]]) -> None:
    title = f"{next(iter(pickles.values()))[0]}: the process that converts it to safetensors"
    dict(run_job("unpickle", title, timeout_s=_TIMEOUT_S, pickles=pickles))


def _folder_of_links(
    folder: Path, pickles: Mapping[Path, list[Path]], cached: Mapping[Path, Path], cache_folder: Path
) -> Path:
    """Its name tells all its links, so that each start may add what it lacks."""
    replaced = {path for each in pickles.values() for path in each}
    links = {path: path for path in files_of(folder) if path not in replaced and path.name != REFERENCE_FILE}
    links |= {made: file.resolve() for made, file in cached.items()}
    told = json.dumps(sorted((str(path), str(target)) for path, target in links.items()))
    place = cache_folder.resolve() / "converted" / hashlib.sha256(told.encode()).hexdigest()[:32]
    for path, target in links.items():
        link = place / path.relative_to("/")
        with suppress(OSError):
            if os.readlink(link) == str(target):
                continue
        link.parent.mkdir(parents=True, exist_ok=True)
        partial = link.with_name(f"{link.name}.{os.getpid()}")
        partial.symlink_to(target)
        partial.replace(link)
    return place / folder.relative_to("/")
