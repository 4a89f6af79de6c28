"""Refuses architectures that the installed transformers does not have, without importing it.

Owns the search in two of its files, by which a model of an unknown architecture is one clear line before any process
has started. If the files are not as expected, the worker reports the architecture. Called by
`vecd.launch.config.plan`.
"""

import importlib.metadata
import importlib.util
from contextlib import suppress
from pathlib import Path

from vecd.shm.card import ModelCard, ModelError

# Where its names of architectures stand, in double quotes. Source: transformers 5.23.
_FILES = ("auto_mappings.py", "configuration_auto.py")


def refuse_unknown(card: ModelCard) -> None:
    """Raises ModelError for a model type that transformers does not even name."""
    names = _text_with_names()
    if '"bert"' in names and f'"{card.model_type}"' not in names:
        version = importlib.metadata.version("transformers")
        raise ModelError(
            f"{card.weights_folder}/config.json: transformers {version} has no architecture {card.model_type!r} "
            "(model_type)"
        )


def _text_with_names() -> str:
    package = importlib.util.find_spec("transformers")  # finds without importing
    if package is None or package.origin is None:
        return ""
    text = ""
    for name in _FILES:
        with suppress(OSError, UnicodeDecodeError):
            text += (Path(package.origin).parent / "models" / "auto" / name).read_text(encoding="utf-8")
    return text
