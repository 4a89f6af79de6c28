"""Fetches a model from the Hugging Face hub into its cache, or finds it there.

Owns the order in which forms of weights are asked for: safetensors, pickles, and where these cannot be read an ONNX
export. Runs in a process of its own (`vecd.child`), so that neither the library nor a download's memory stays.
"""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from vecd.base.files import JsonObject
from vecd.base.programs import NEEDS_TORCH, has_torch
from vecd.model.card import ModelError, one_line
from vecd.model.files import EXPORT, MODEL_FILES, PICKLED_HEADS, PICKLED_WEIGHTS
from vecd.model.steps import folders_without_safetensors
from vecd.shm.job import Report

_UNWANTED = ["openvino/*", "coreml/*"]
_EXPORTS = ["onnx/*", "*/onnx/*"]


def work(report: Report, model: str, revision: str) -> JsonObject:
    """The job "fetch"; `revision`: "" for the newest one."""
    report("fetching it")
    return {"folder": str(fetch(model, revision or None))}


def fetch(model: str, revision: str | None) -> Path:
    """The folder of the model's files; files that the cache lacks are downloaded with a progress bar. The library reads
    the token for private models from HF_TOKEN. Raises ModelError, in one line, when the model is not available."""
    at = f"{model}@{revision}" if revision else model
    try:
        return _fetch(model, revision)
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


def _fetch(model: str, revision: str | None) -> Path:
    def download(*weights: str, unwanted: Sequence[str] = ()) -> Path:
        wanted = [*MODEL_FILES, *PICKLED_HEADS, *weights]
        unwanted = [*_UNWANTED, *unwanted]
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted))

    def lacking(form: str) -> list[str]:
        parts = (part for part in folders_without_safetensors(folder) if not any(part.glob(PICKLED_WEIGHTS)))
        return [str(part.relative_to(folder) / form) for part in parts]

    folder = download(unwanted=_EXPORTS)
    if has_torch() and (pickles := lacking(PICKLED_WEIGHTS)):
        download(*pickles, unwanted=_EXPORTS)
    if exports := lacking(f"{EXPORT}*"):
        download(*exports)
    if not (has_torch() or any(folder.rglob("*.safetensors")) or (folder / EXPORT).is_file()):
        raise ModelError(f"has neither safetensors nor {EXPORT}, and making safetensors of pickles {NEEDS_TORCH}")
    return folder
