"""Where a model's fast tokenizer is, also for a model that comes without one.

Owns the folder `tokenizers` in the cache: one file for each content of a model's tokenizer files. The conversion
itself needs transformers, and is a process of its own. The gateway gets a path to a copy that this process holds: each
time that it is restarted it reads the same content, even if the file has been replaced or overwritten, the cache
emptied, or no cache can be written; and nothing is left behind. Called by `vecd.launch.config.plan`.
"""

import hashlib
import importlib.metadata
import logging
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vecd.launch.base.exit_codes import EXIT_OK
from vecd.launch.base.programs import run_child
from vecd.shm import logs
from vecd.shm.card import ModelCard, ModelError, vocabulary_files
from vecd.shm.sealed_memory import copy_sealed, path_of
from vecd.workers.installed import NEEDS_TORCH, has_torch

# Besides the vocabularies, what AutoTokenizer reads to choose a class and its special tokens.
_OTHER_FILES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TIMEOUT_S = 600.0  # a sentencepiece model with byte pairs takes the longest: its merges are worked out anew
_VERSION = "1"  # of vecd.workers.conversion: another one makes every tokenizer anew


def with_tokenizer(
    card: ModelCard, model: str, cache_folder: Path, report: Callable[[str], None] = logs.say
) -> ModelCard:
    """The card, its tokenizer converted if the model has only a slow one's files, which is reported; `model` is its
    name for people.

    Raises ModelError when it cannot be read or converted.
    Side effects: a descriptor that stays open until `vecd.shm.sealed_memory.close_copy`; a file in the cache, where it
    can be written.
    """
    if card.tokenizer_file:
        path = Path(card.tokenizer_file)
    elif not has_torch():
        raise ModelError(f"{card.weights_folder}: there is no tokenizer.json, and making one {NEEDS_TORCH}")
    else:
        path = cache_folder / "tokenizers" / _key(Path(card.weights_folder)) / "tokenizer.json"
    try:
        return replace(card, tokenizer_file=copy_sealed(str(path)))
    except OSError as error:
        if card.tokenizer_file:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        report(f"converting the tokenizer of {model} (once)")
        fd = _convert(card)
        _store(fd, path)
        return replace(card, tokenizer_file=path_of(fd))


def _key(weights_folder: Path) -> str:
    """A digest of everything that the conversion depends on. Raises ModelError for a file that cannot be read."""
    digest = hashlib.sha256(_VERSION.encode())
    for library in ("transformers", "tokenizers"):
        digest.update(f"\0{library} {importlib.metadata.version(library)}".encode())
    others = [weights_folder / name for name in _OTHER_FILES]
    for path in sorted([*vocabulary_files(weights_folder), *(path for path in others if path.is_file())]):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        digest.update(f"\0{path.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()[:32]


def _convert(card: ModelCard) -> int:
    """A descriptor of a file without a name that has the fast tokenizer's JSON."""
    fd = os.memfd_create("tokenizer.json", os.MFD_CLOEXEC)
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        status = run_child(
            "convert", card.weights_folder, str(card.vocab_size), fd=fd, env=offline, timeout_s=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        os.close(fd)
        raise ModelError(f"{card.weights_folder}: tokenizer not converted within {_TIMEOUT_S:.0f} s") from None
    if status != EXIT_OK:
        answer = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
        os.close(fd)
        raise ModelError(answer or f"{card.weights_folder}: tokenizer not converted (exit code {status})")
    return fd


def _store(fd: int, cached: Path) -> None:
    """Write to the cache, whole or not at all; log a warning if it cannot be written."""
    partial = cached.with_name(f"tokenizer.json.{os.getpid()}")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(os.pread(fd, os.fstat(fd).st_size, 0))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, cached)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        logs.say(f"the converted tokenizer is not cached for the next start: {error}", logging.WARNING)
