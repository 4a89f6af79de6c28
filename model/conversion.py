"""Makes the fast tokenizer's file for a model that has only a slow tokenizer's files: vocab.txt, merges.txt, *.model.

Owns the call of transformers' AutoTokenizer, and the check that the file gives the same ids. Runs no code of the
model's.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import AutoTokenizer

from vecd.base.programs import are_installed
from vecd.model.files import Folder, ModelError, vocabulary_files
from vecd.shm.job import Report

_PROBES = (
    "",
    " ",
    "a",
    "The quick brown fox jumps over the lazy dog, 12345 times.",
    "  two spaces before, two between  and two behind  ",
    "Tabs\tand\nlines\r\n, and a no-break\u00a0space",
    "UPPER CASE, lower case, CamelCase; it's 3.14 €, [brackets] <angles> {braces} #hash @at",
    "Ünïcödé naïve café Straße Œuvre; e\u0301 decomposed",
    "日本語の文章と中文句子, 한국어 문장",
    "Привет мир! שלום עולם مرحبا بالعالم नमस्ते",
    "🙂 👩‍👩‍👧 🇩🇪 emoji\u200d",
    "zero\u200bwidth, soft\u00adhyphen, control\x07, replacement\ufffd, ﬁ ligature, ① ½",
    "pneumonoultramicroscopicsilicovolcanoconiosis " + "x" * 200,
)


def work(report: Report, folder: str, vocab_size: int, target: str) -> None:
    """The job "convert"."""
    report("converting")
    convert(Path(folder), vocab_size, Path(target))


def convert(folder: Path, vocab_size: int, target: Path) -> None:
    """Write the fast tokenizer of the model in `folder` to `target`. Its ids must be below `vocab_size`. Raises
    ModelError, in one line, also when the file's ids differ from AutoTokenizer's."""
    config = Folder(folder).optional("tokenizer_config.json")
    if config.get("auto_map"):
        raise config.error("asks for Python code from the model's repository to be run (auto_map)")
    tokenizer = _load(folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{folder}: transformers has no fast form of {type(tokenizer).__name__}; no tokenizer.json")
    # A class that does not find its file has only special tokens, and treats every word as unknown.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        names = ", ".join(path.name for path in vocabulary_files(folder))
        raise ModelError(f"{folder}: {type(tokenizer).__name__} takes no vocabulary from {names}; no tokenizer.json")
    target.write_text(backend.to_str(), encoding="utf-8")
    _compare(folder, tokenizer, tokenizers.Tokenizer.from_file(str(target)), vocab_size)


def _load(folder: Path) -> Any:
    pieces = [path for path in vocabulary_files(folder) if path.suffix == ".model"]
    needed = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
    missing = [package for package, module in needed.items() if not are_installed(module)]
    if pieces and missing:
        raise ModelError(f"{pieces[0]}: reading it needs {' and '.join(missing)}: pip install 'vecd[convert]'")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises everything from KeyError to ImportError, over several lines
        names = ", ".join(path.name for path in vocabulary_files(folder))
        why = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder}: no tokenizer can be made of {names}: {type(error).__name__}: {why}") from error


def _compare(folder: Path, expected: Any, written: tokenizers.Tokenizer, vocab_size: int) -> None:
    for text in (*_PROBES, *_probes_with(expected.all_special_tokens)):
        try:
            ids, made = expected(text)["input_ids"], written.encode(text).ids
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise ModelError(f"{folder}: {type(expected).__name__} cannot tokenize {text!r:.60}: {error}") from error
        if made != ids:
            raise ModelError(f"{folder}: the fast tokenizer differs from {type(expected).__name__} for {text!r:.60}")
        if ids and max(ids) >= vocab_size:
            raise ModelError(
                f"{folder}: {type(expected).__name__} gives the token id {max(ids)}, and the model has {vocab_size}: "
                "a file of the tokenizer is missing, or another model's"
            )


def _probes_with(special_tokens: list[str]) -> Iterator[str]:
    for token in special_tokens:
        yield f"a {token} b"
        yield f"a{token}b{token.lower()} {token}"
