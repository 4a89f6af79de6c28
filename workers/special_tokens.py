"""The special tokens that a model's tokenizer puts around a text, as its file says it.

Reads the part of tokenizer.json about them alone: the tables of words behind it have megabytes. Imports neither torch
nor tokenizers. Called by `vecd.workers.engines.parity` and `vecd.workers.engines.references`.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from vecd.shm.card import ModelCard

Around: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids before a text, and behind it."""

_NONE: Around = ((), ())


def special_tokens(card: ModelCard) -> Around:
    """Nothing for a tokenizer without a template, where there is no tokenizer.json to say it, and for a model without a
    head that gives scores: only such heads read special tokens."""
    if card.score is None:
        return _NONE
    path = Path(card.tokenizer_file)
    try:
        before, behind = _read(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _NONE  # the gateway reports a file that is no tokenizer
    is_known = all(0 <= token < card.vocab_size for token in (*before, *behind))
    return (before, behind) if is_known and len(before) + len(behind) < card.max_tokens else _NONE


@lru_cache(4)
def _read(path: Path, _changed_at: int) -> Around:
    text, name = path.read_text(encoding="utf-8"), '"post_processor":'
    start = text.index(name) + len(name)  # the library writes it before the words, of which one may have this name
    processor, _ = json.JSONDecoder().raw_decode(text, start + (text[start] == " "))  # one if it is indented
    return next(_templates(processor or {}), _NONE)


def _templates(processor: dict[str, Any]) -> Iterator[Around]:
    """Source: processors of the tokenizers library."""
    match processor.get("type"):
        case "Sequence":
            for each in processor["processors"]:
                yield from _templates(each)
        case "BertProcessing" | "RobertaProcessing":
            yield (int(processor["cls"][1]),), (int(processor["sep"][1]),)
        case "TemplateProcessing":
            before: list[int] = []
            behind: list[int] = []
            side = before
            for piece in processor["single"]:
                if "SpecialToken" in piece:
                    side += map(int, processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
                else:
                    side = behind
            yield tuple(before), tuple(behind)
