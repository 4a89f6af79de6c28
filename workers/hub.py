"""Fetches a model from the Hugging Face hub into its cache, or finds it there.

Owns the selection of files: JSON, vocabularies and safetensors, and nothing executable. Runs in a process of its own
(`vecd.launch.child`), so that neither the library nor a download's memory stays.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from vecd.shm.card import ModelError, one_line

_WANTED = ["*.json", "*.txt", "*.model", "*.safetensors"]
_UNWANTED = ["onnx/*", "openvino/*", "*.onnx*", "coreml/*"]


def fetch(model: str, revision: str | None) -> Path:
    """The folder of the model's files; files that the cache lacks are downloaded with a progress bar.

    Needs no network if the cache has all files. The library reads the token for private models from HF_TOKEN. Raises
    ModelError, in one line, when the model is not available.
    """
    at = f"{model}@{revision}" if revision else model
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError:
        raise ModelError(
            f"{at}: the hub asks for permission: accept the model's terms there and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{at}: the hub has the model, but not this revision") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{at}: no such folder, and the hub has no such model (or it is private and HF_TOKEN is not set)"
        ) from None
    except LocalEntryNotFoundError:
        raise ModelError(f"{at}: no such folder, not in the hub's cache, and the hub cannot be reached") from None
    except Exception as error:  # the HTTP library may raise anything
        raise ModelError(f"{at}: cannot be fetched: {one_line(error)}") from None
