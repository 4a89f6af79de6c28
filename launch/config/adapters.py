"""Finds the base of an adapter, and has a folder of links made in which the model has the merged weights.

Owns which files of the two a merged model has. No reader knows of adapters: see `vecd.launch.config.made_weights`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from vecd.launch.config.made_weights import Made, Making, carry_out, with_made_weights
from vecd.launch.config.models import folder_of
from vecd.model.adapters import CONFIG, WEIGHTS, Adapter, merged_settings, read_adapter
from vecd.model.files import Folder, ModelError, files_of, weight_files
from vecd.model.steps import read_modules

Fetch: TypeAlias = Callable[[str, str, str, Callable[[str], None]], Path]
"""The folder of a hub id in a revision, and of a file of weights, "" for none."""
_INDEX = "model.safetensors.index.json"


def with_adapter(
    folder: Path, task: str, file: str, model: str, cache_folder: Path, report: Callable[[str], None], fetch: Fetch
) -> tuple[Path, str | None]:
    """The folder to read the model in `folder` from, with the adapter that it is, or that it has for `task`, merged;
    itself if there is none. And the task; None for a model that has no adapters by task. `file`: the weights that are
    named, "" for none. `model` is its name for people. Raises ModelError. Side effect: files in the cache directory."""
    adapter = read_adapter(folder, task)
    if adapter is None:
        return folder, None
    if file:
        raise ModelError(f"{folder}: --file {file} given, and an adapter is merged into the model's safetensors alone")
    base = folder
    if adapter.base:
        base = with_made_weights(_find_base(adapter, report, fetch), "", adapter.base, cache_folder, report)
        if read_adapter(base) is not None:
            raise ModelError(f"{adapter.folder}/{CONFIG}: its base {adapter.base} is an adapter, or has some")
    try:
        making = _making(adapter, folder, base, task)
        return carry_out(making, folder, model, cache_folder, report), task if adapter.tasks else None
    except OSError as error:
        raise ModelError(f"{error.filename or folder}: the adapter cannot be merged: {error}") from None


def _find_base(adapter: Adapter, report: Callable[[str], None], fetch: Fetch) -> Path:
    assert adapter.folder is not None
    named = folder_of(adapter.base)
    for path in (adapter.folder / adapter.base, named):  # an absolute one is itself; PEFT's are relative to its process
        if path is not None and path.is_dir():
            return path.resolve()
    if named is not None:
        raise ModelError(f"{adapter.folder}/{CONFIG}: its base is the folder {adapter.base}, which is not there")
    return fetch(adapter.base, adapter.revision, "", report)


def _making(adapter: Adapter, folder: Path, base: Path, task: str) -> Making:
    modules, base_modules = read_modules(Folder(folder)), read_modules(Folder(base))
    base_place = base / (base_modules[0].path if base_modules else "")
    place = folder / (modules[0].path if modules else base_place.relative_to(base))
    weights = weight_files(base_place)
    sources = [*weights] if adapter.folder is None else [adapter.folder / CONFIG, adapter.folder / WEIGHTS, *weights]
    lent = {folder / "merged" / f"{index}-{path.name}": path for index, path in enumerate(sources)}  # changes are seen
    if base == folder:
        names = merged_settings(Folder(folder), task)
        sources += [folder / name for name in names if (folder / name).is_file()]
    others = [each for each in files_of(base) if each not in (*weights, base_place / _INDEX)]
    if modules and base != folder:
        # What sentence-transformers does with the transformer's states is the adapter's own.
        own = ("modules.json", "config_sentence_transformers.json", "sentence_")
        files = (each for each in others if each.parent == base_place and not each.name.startswith(own))
        lent |= {place / each.name: each for each in files}
    elif base != folder:
        lent |= {folder / each.relative_to(base): each for each in others}
    made = {place / "model.safetensors": Made("adapters", sources, {"task": task})}
    replaced = frozenset({place / _INDEX, *(place / path.name for path in weights)})
    return Making("an adapter", "adapted", made, replaced, lent)
