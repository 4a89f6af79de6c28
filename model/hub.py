"""Fetches a model from the Hugging Face hub into its cache, or finds it there.

Owns the order in which forms of weights are asked for: safetensors, pickles, and where these cannot be read an ONNX
export or GGUF, of which one is fetched. Runs in a process of its own (`vecd.child`), so that neither the library nor a
download's memory stays.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from vecd.base.files import JsonObject
from vecd.base.programs import NEEDS_TORCH, has_torch
from vecd.model.card import ModelError, one_line
from vecd.model.files import EXPORT, MODEL_FILES, PICKLED_HEADS, PICKLED_WEIGHTS, in_order, why_not_named
from vecd.model.steps import folders_without_safetensors
from vecd.shm.job import Report

_README = "README.md"
"""Its tags, and the model that this one was made from. It is none of the files whose change makes another model."""
_UNWANTED = ["openvino/*", "coreml/*"]
_EXPORTS = ["onnx/*", "*/onnx/*"]


def work(report: Report, model: str, revision: str, file: str) -> JsonObject:
    """The job "fetch"; `revision`: "" for the newest one."""
    report("fetching it")
    return {"folder": str(fetch(model, revision or None, file))}


def fetch(model: str, revision: str | None, file: str = "") -> Path:
    """`file`: of the weights, beside safetensors or in their place; "": the first choice where there is nothing else.
    The folder of the model's files; files that the cache lacks are downloaded with a progress bar. The library reads
    the token for private models from HF_TOKEN. Raises ModelError, in one line, when the model is not available."""
    at = f"{model}@{revision}" if revision else model
    try:
        return _fetch(model, revision, file)
    except ModelError as error:
        fault = str(error)
    except Exception as error:  # the HTTP library may raise anything
        known = (text for kind, text in _FAULTS if isinstance(error, kind))
        fault = next(known, f"cannot be fetched: {one_line(error)}")
    raise ModelError(f"{at}: {fault}")


_FAULTS = (
    (GatedRepoError, "the hub asks for permission: accept the model's terms there and set HF_TOKEN"),
    (RevisionNotFoundError, "the hub has the model, but not this revision"),
    (
        RepositoryNotFoundError,
        "no such folder, and the hub has no such model (or it is private and HF_TOKEN is not set)",
    ),
    (LocalEntryNotFoundError, "no such folder, not in the hub's cache, and the hub cannot be reached"),
)
"""By the error of the library, special ones first."""


def _fetch(model: str, revision: str | None, file: str) -> Path:
    def download(*weights: str, unwanted: Sequence[str] = ()) -> Path:
        wanted = [*MODEL_FILES, _README, *PICKLED_HEADS, *weights]
        unwanted = [*_UNWANTED, *unwanted]
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted))

    def lacking(form: str) -> list[str]:
        parts = (part for part in folders_without_safetensors(folder) if not any(part.glob(PICKLED_WEIGHTS)))
        return [str(part.relative_to(folder) / form) for part in parts]

    if file:  # GGUF has the place of safetensors, and an export is compared with them
        folder = download(file, *_data_of(file), unwanted=["model*.safetensors"])
        if not (folder / file).is_file():
            raise ModelError(why_not_named(file, in_order(_list_files(model, revision, folder))))
        return folder if file.endswith(".gguf") else download(file)
    folder = download(unwanted=_EXPORTS)
    if has_torch() and (pickles := lacking(PICKLED_WEIGHTS)):
        download(*pickles, unwanted=_EXPORTS)
    parts = lacking("")
    files = _list_files(model, revision, folder) if parts else []
    for part in parts:
        if found := in_order(os.path.relpath(name, part) for name in files):
            first = os.path.normpath(f"{part}/{found[0]}")
            download(first, *_data_of(first))
    if not (has_torch() or any(folder.rglob("*.safetensors")) or in_order(_files_in(folder))):
        raise ModelError(f"has neither safetensors nor {EXPORT}, and making safetensors of pickles {NEEDS_TORCH}")
    return folder


def _data_of(file: str) -> tuple[str, ...]:
    """What the weights of an ONNX export may be in."""
    return (f"{file}_data*", f"{file}.data*") if file.endswith(".onnx") else ()


def _list_files(model: str, revision: str | None, folder: Path) -> list[str]:
    """Of the repository; where the hub cannot be asked, of its `folder` in the cache."""
    if HF_HUB_OFFLINE:
        return _files_in(folder)
    try:
        return HfApi().list_repo_files(model, revision=revision)
    except Exception:  # the HTTP library may raise anything, and a model in the cache needs no hub
        return _files_in(folder)


def _files_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
