"""The identity of a model: a digest of everything that decides which numbers a text gets.

Owns what is in it: docs/api.md and docs/adr/0028-fleet.md say why not more. The number format is not: the workers say
it. A field of a card that has its default is left out, so that a new field does not change the identities of other
models.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from vecd.gateway.config import AliasDefaults
from vecd.launch.config.plan import Plan
from vecd.model.card import ModelCard, export_files
from vecd.model.digests import digest_of_content, digest_of_file
from vecd.model.files import ModelError, read_optional, single_file
from vecd.workers.weights import weight_files

_FORMAT = 1
"""Another one gives every model another identity: only for a change of what vecd computes from the same files."""
_NUM_DIGITS = 32
_PLACES = frozenset({"folder", "weights_folder", "weights_bytes", "tokenizer_file", "export_file", "path", "file"})
_NOT_COUNTED = frozenset({"max_tokens", "is_matryoshka", "assumes_pooling"})
"""Fields of a card in whose place the configuration's count, and one that changes no number."""
_WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Keys of config.json that change no number. The workers say the format."""
_ABSENT = 0, 0, 0


Versions: TypeAlias = dict[str, tuple[int, int, int]]


class Digests(NamedTuple):
    model: str
    """32 hexadecimal digits, as the next."""
    by_alias: dict[str, str]
    files: Versions


def read_identity(plan: Plan) -> Digests | None:
    """The digests of the plan's model, whose tokenizer is open. None if a file that counts has changed since the plan
    was made: a reload makes another. Takes 0.9 s for 1 GB with SHA instructions, or 0.8 ms if the digests of the
    weights are remembered: not for an event loop.

    Raises OSError, ValueError, KeyError or ModelError for files that cannot be read. Side effect: the digests of the
    weights are remembered in the cache directory, if it can be written.
    """
    before = _versions_of(plan)
    facts = _facts_of(plan)
    ranges = plan.settings.quantization_ranges
    if not _is_of(plan, before) or _versions_of(plan) != before:
        return None
    if ranges is not None and not plan.has_read(ranges):
        return None
    model = _digest(facts)
    return Digests(model, {each.alias: of_alias(model, each) for each in plan.gateway.alias_defaults}, before)


def is_unchanged(plan: Plan, digests: Digests) -> bool:
    """Whether the plan's files are still those that the digests are of. Not for an event loop."""
    try:
        return _versions_of(plan) == digests.files
    except (OSError, ValueError, KeyError, ModelError):
        return False


def of_alias(model: str, defaults: AliasDefaults) -> str:
    return _digest({"model": model, "defaults": defaults.given()})


def _facts_of(plan: Plan) -> dict[str, Any]:
    config, card, ranges = plan.gateway, plan.gateway.card, plan.settings.quantization_ranges
    chat = config.chat_template
    card_facts = {name: value for name, value in facts_of(card).items() if name not in _NOT_COUNTED}
    return {
        "format": _FORMAT,
        # The vectors of the dummy engine are not the model's.
        "is_dummy": plan.workers[0].is_dummy,
        "card": {**card_facts, "prompts": dict(card.prompts)},
        "files": _digests_of_files(card, plan.settings.cache_folder),
        "config": _without_names(read_optional(Path(card.weights_folder) / "config.json")),
        "tokenizer": digest_of_content(Path(card.tokenizer_file)),
        "chat_template": None if chat is None else [chat.source, chat.tokens],
        "max_tokens": config.max_tokens,
        "overflow": config.overflow,
        "token_ids": config.token_ids,
        "literal_special_tokens": config.literal_special_tokens,
        "matryoshka": config.is_matryoshka,
        "quantization_ranges": None if ranges is None else digest_of_content(ranges),
    }


def facts_of(value: Any) -> Any:
    if is_dataclass(value):
        found = ((each, getattr(value, each.name)) for each in fields(value) if each.name not in _PLACES)
        return {each.name: facts_of(part) for each, part in found if each.default is MISSING or part != each.default}
    return [facts_of(part) for part in value] if isinstance(value, (tuple, list)) else value


def _without_names(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_names(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _WITHOUT_EFFECT
    }


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_NUM_DIGITS]


# --- files ------------------------------------------------------------------------------------------------------


def _versions_of(plan: Plan) -> Versions:
    """The tokenizer and the ranges are copied, so they do not count."""
    card = plan.gateway.card
    config = Path(card.weights_folder) / "config.json"
    found = [(str(path), path.stat()) for path in (*_weights_of(card), *_others_of(card), config) if path.exists()]
    versions = {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found}
    return {str(config): _ABSENT, **versions}


def _is_of(plan: Plan, versions: Versions) -> bool:
    """Whether these are the files that were there when the plan was made. It knows those of some folders only."""
    known = {name: tuple(version) for name, *version in plan.model_files}
    folders = {str(Path(name).parent) for name in known}
    return all(
        known.get(name, _ABSENT) == version
        for name, version in versions.items()
        if name in known or str(Path(name).parent) in folders
    )


def _digests_of_files(card: ModelCard, cache_folder: Path) -> dict[str, list[str]]:
    """Of the weights in any order, because they may be cut into files of any name; of the steps in theirs."""
    return {
        "weights": sorted(digest_of_file(path, cache_folder) for path in _weights_of(card)),
        "steps": [digest_of_file(path, cache_folder) for path in _others_of(card)],
    }


def _others_of(card: ModelCard) -> list[Path]:
    others = [card.sparse.query_weights] if card.sparse is not None and card.sparse.query_weights else []
    return [*card.step_files, *(Path(card.folder) / name for name in others)]


def _weights_of(card: ModelCard) -> list[Path]:
    if card.export_file:
        return export_files(Path(card.export_file))
    folder = Path(card.weights_folder)
    return [single_file(folder)] if card.is_static else weight_files(folder)
