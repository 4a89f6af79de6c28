"""Has weights made that no reader knows as they are, and gives the model a folder in which it has those that were made.

Owns the folder `converted` in the cache directory, and the table of makings: which files are made, of which, and how
(`vecd.workers.torch.making` makes them, once, in a process of its own). Opens no weights.

    <cache directory>/converted/<digest>.safetensors       by how it is made, and the content of what it is made of
    <cache directory>/converted/<digest>.json              settings that were made with it, by their paths
    <cache directory>/converted/<digest>/<model's folder>  links to these and to the model's other files

The last is the model's folder from there on. So every reader finds safetensors under their usual names, and none
knows of pickles: the engines, transformers, digests and what looks whether files have changed. As it ends with the path
of the model's own folder, that can be told of it (`source_of`), for messages and for what is written beside a model.
Each making takes a folder and gives one, so one may be followed by another.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from vecd.base.failures import source_of
from vecd.base.files import JsonMapping, JsonObject
from vecd.base.programs import NEEDS_TORCH, has_torch
from vecd.model.digests import digest_of_file
from vecd.model.files import (
    PICKLED_HEADS,
    PICKLED_WEIGHTS,
    Folder,
    ModelError,
    files_of,
    has_safetensors,
    made_with,
    shards,
    weight_files,
    weights_in,
)
from vecd.model.steps import folders_without_safetensors, read_modules
from vecd.shm.job import run_job
from vecd.workers.config import REFERENCE_FILE

_VERSION = "2"
_TIMEOUT_S = 3600.0
"""Of the making of one model: 14 GB from a disk of 10 MB/s take 25 minutes."""


@dataclass(frozen=True, slots=True)
class Made:
    """How one file of safetensors is made."""

    how: str
    """A key of `vecd.workers.torch.making.READERS`."""
    sources: Sequence[Path]
    """By their content and `options` the file is found again; settings may be among them."""
    options: JsonMapping = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Making:
    """What a folder lacks, and how it gets it."""

    what: str
    """In messages: "a pickle" of a source, "pickled" of the weights."""
    adjective: str
    made: Mapping[Path, Made]
    """By the path that the model has it at."""
    replaced: frozenset[Path] = frozenset()
    """Files of the folder that it has no longer, beside the sources of what is made."""
    lent: Mapping[Path, Path] = field(default_factory=dict)
    """Files of other folders, by the path that the model has them at. The folder's own come before."""


def _of_pickles(folder: Path, file: str) -> Making | None:
    """Without torch, those that have an ONNX export beside them stay as they are."""
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
    made = {
        path: Made("pickles", each)
        for path, each in found.items()
        if has_torch() or not weights_in(path.parent, ".onnx")
    }
    return Making("a pickle", "pickled", made) if made else None


_OWN_SETTINGS = ("modules.json", "1_Pooling/config.json", "tokenizer.json")
"""What GGUF has as well, less exactly."""


def _of_gguf(folder: Path, file: str) -> Making | None:
    """The one that is named, or the first where there are no other weights."""
    others = [path for pattern in ("model*.safetensors*", PICKLED_WEIGHTS) for path in folder.glob(pattern)]
    found = [folder / file]
    if not file.endswith(".gguf"):
        found = [] if file or others or weights_in(folder, ".onnx") else weights_in(folder, ".gguf")
    if not found:
        return None
    own = [name for name in _OWN_SETTINGS if (folder / name).is_file()]
    made = {folder / "model.safetensors": Made("gguf", found[:1], {"own": own})}
    return Making("GGUF", "GGUF", made, replaced=frozenset((*others, *folder.glob("*.gguf"))))


def _of_quantized(folder: Path, file: str) -> Making | None:
    modules = read_modules(Folder(folder))
    part = folder / modules[0].path if modules and not modules[0].leads_out else folder
    is_quantized = "quantization_config" in Folder(part).optional("config.json")
    if not is_quantized or not has_safetensors(part) or file:
        return None
    made = {part / "model.safetensors": Made("quantized", [part / "config.json", *weight_files(part)])}
    return Making("quantized", "quantized", made, replaced=frozenset({part / "model.safetensors.index.json"}))


MAKINGS: tuple[Callable[[Path, str], Making | None], ...] = (_of_gguf, _of_pickles, _of_quantized)
"""In this order, each for the folder that the one before has given, and the file of weights that is named there. Raise
ModelError and OSError."""


# --- carrying one out -------------------------------------------------------------------------------------------

_Files: TypeAlias = dict[Path, JsonObject]


def with_made_weights(folder: Path, file: str, model: str, cache_folder: Path, report: Callable[[str], None]) -> Path:
    """The folder to read the model in `folder` from: itself, unless weights of it have to be made. `file`: the weights
    that are named, "" for none. `model` is its name for people. Raises ModelError for those that cannot be. Side
    effect: files in the cache directory."""
    folder = folder.resolve()
    try:
        for find in MAKINGS:
            if making := find(folder, file):
                folder = carry_out(making, folder, model, cache_folder, report)
        return folder
    except OSError as error:
        raise ModelError(f"{error.filename or folder}: the weights cannot be converted: {error}") from None


def carry_out(making: Making, folder: Path, model: str, cache_folder: Path, report: Callable[[str], None]) -> Path:
    """The folder of links in which the model has what is made. Raises ModelError and OSError."""
    place = cache_folder.resolve() / "converted"
    cached = {path: place / f"{_digest_of(made, cache_folder)}.safetensors" for path, made in making.made.items()}
    missing = [path for path, file in cached.items() if made_with(file) is None]
    if missing:
        first = making.made[missing[0]].sources[0]
        if not has_torch():
            raise ModelError(f"{first}: {making.what}, and making safetensors of it {NEEDS_TORCH}")
        report(f"converting the {making.adjective} weights of {model} to safetensors (once)")
        orders = {str(cached[path]): order_of(making.made[path]) for path in missing}
        make(f"{first}: the process that converts it to safetensors", orders)
    replaced = making.replaced.union(*(each.sources for each in making.made.values()))
    links = {folder / path.relative_to(folder): target for path, target in making.lent.items()}
    links |= {path: path for path in files_of(folder) if path not in replaced and path.name != REFERENCE_FILE}
    links |= cached
    files: _Files = {}
    for path, file in cached.items():
        files |= {path.parent / name: content for name, content in (made_with(file) or {}).items()}
    return _folder_of(folder, links, files, place)


def _digest_of(made: Made, cache_folder: Path) -> str:
    digests = [digest_of_file(path, cache_folder) for path in made.sources]
    told = json.dumps([_VERSION, made.how, made.options, digests], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def order_of(made: Made) -> JsonObject:
    return {"how": made.how, "sources": list(map(str, made.sources)), "options": dict(made.options)}


def make(title: str, orders: JsonMapping) -> None:
    dict(run_job("make", title, timeout_s=_TIMEOUT_S, orders=dict(orders)))


def _folder_of(folder: Path, links: Mapping[Path, Path], files: _Files, place: Path) -> Path:
    """Its name tells all that is in it, so that each start may add what it lacks."""
    own = Path(source_of(str(folder)))

    def in_own(path: Path) -> Path:
        return own / path.relative_to(folder)

    targets = {str(in_own(path)): str(target) for path, target in links.items() if path not in files}
    texts = {str(in_own(path)): json.dumps(content, indent=2) for path, content in files.items()}
    told = json.dumps([sorted(targets.items()), sorted(texts.items())])
    place = place / hashlib.sha256(told.encode()).hexdigest()[:32]
    for name, target in targets.items():
        _put(place / name.lstrip("/"), target, os.readlink, lambda path, target: path.symlink_to(target))
    for name, text in texts.items():
        _put(place / name.lstrip("/"), text, Path.read_text, Path.write_text)
    return place / own.relative_to("/")


def _put(path: Path, content: str, read: Callable[[Path], str], write: Callable[[Path, str], object]) -> None:
    with suppress(OSError, ValueError):
        if read(path) == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)  # in a container, a process that was killed had the same id
    write(partial, content)
    partial.replace(path)
