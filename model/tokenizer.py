"""Where a model's fast tokenizer is, also for a model that comes without one.

Owns the folder `tokenizers` in the cache. The conversion needs transformers, and is a process of its own. The gateway
gets a path to a copy that this process holds: each time that it is restarted it reads the same content.
"""

import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vecd.base import logs
from vecd.base.files import JsonObject, write_whole
from vecd.base.programs import NEEDS_TORCH, has_torch
from vecd.model.card import ModelCard
from vecd.model.files import ModelError, vocabulary_files
from vecd.shm.arena import copy_sealed, path_of
from vecd.shm.job import run_job

# Besides the vocabularies, what AutoTokenizer reads to choose a class and its special tokens.
_OTHER_FILES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TIMEOUT_S = 600.0  # a sentencepiece model with byte pairs takes the longest: its merges are worked out anew
_VERSION = "1"  # of vecd.model.conversion: another one makes every tokenizer anew


def with_tokenizer(
    card: ModelCard, model: str, cache_folder: Path, report: Callable[[str], None] = logs.say
) -> ModelCard:
    """The card, its tokenizer converted if need be; `model` is its name for people. Raises ModelError when it cannot be
    read or converted. Side effects: a descriptor that stays open until `vecd.shm.arena.close_copy`; a file in the
    cache."""
    if card.tokenizer_file:
        path = Path(card.tokenizer_file)
    elif not has_torch():
        raise ModelError(f"{card.weights_folder}: there is no tokenizer.json, and making one {NEEDS_TORCH}")
    else:
        path = cache_folder / "tokenizers" / key_of(Path(card.weights_folder)) / "tokenizer.json"
    try:
        return replace(card, tokenizer_file=copy_sealed(str(path)))
    except OSError as error:
        if card.tokenizer_file:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        report(f"converting the tokenizer of {model} (once)")
        fd = convert(card)
        _store(fd, path)
        return replace(card, tokenizer_file=path_of(fd))


def key_of(weights_folder: Path) -> str:
    """A digest of everything that the conversion depends on. Raises ModelError."""
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


def convert(card: ModelCard) -> int:
    fd = os.memfd_create("tokenizer.json", os.MFD_CLOEXEC)
    title = f"{card.weights_folder}: the process that converts the tokenizer"
    order: JsonObject = {"folder": card.weights_folder, "vocab_size": card.vocab_size, "target": path_of(fd)}
    try:
        dict(run_job("convert", title, timeout_s=_TIMEOUT_S, **order))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _store(fd: int, cached: Path) -> None:
    try:
        write_whole(cached, os.pread(fd, os.fstat(fd).st_size, 0), 0o644, is_synced=True)
    except OSError as error:
        logs.say(f"the converted tokenizer is not cached for the next start: {error}", logging.WARNING)
