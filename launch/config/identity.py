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
from typing import Any, NamedTuple

from vecd.gateway.config import AliasDefaults
from vecd.launch.config.plan import Plan
from vecd.model.architecture import sees_later_here
from vecd.model.card import ModelCard
from vecd.model.digests import digest_of_content, digest_of_file
from vecd.model.files import Folder

_FORMAT = 1
"""Another one gives every model another identity: only for a change of what vecd computes from the same files."""
_NUM_DIGITS = 32
_PLACES = frozenset({"folder", "weights_folder", "weights_bytes", "tokenizer_file", "export_file", "path", "file"})
_NOT_COUNTED = frozenset({"max_tokens", "is_matryoshka", "assumes_pooling"})
"""Fields of a card in whose place the configuration's count, and one that changes no number."""
_WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Keys of config.json that change no number. The workers say the format."""


class Digests(NamedTuple):
    model: str
    """32 hexadecimal digits, as the next."""
    by_alias: dict[str, str]


def read_identity(plan: Plan) -> Digests | None:
    """The digests of the plan's model, whose tokenizer is open. None if a file has changed since the plan was made: a
    reload makes another. Takes 0.9 s for 1 GB with SHA instructions, or 0.8 ms if the digests of the weights are
    remembered: not for an event loop.

    Raises OSError, ValueError, KeyError or ModelError for files that cannot be read. Side effect: the digests of the
    weights are remembered in the cache directory, if it can be written.
    """
    facts, ranges = _facts_of(plan), plan.settings.quantization_ranges
    if plan.model_has_changed() or not (ranges is None or plan.has_read(ranges)):
        return None
    model = _digest(facts)
    return Digests(model, {each.alias: of_alias(model, each) for each in plan.gateway.alias_defaults})


def of_alias(model: str, defaults: AliasDefaults) -> str:
    return _digest({"model": model, "defaults": defaults.given()})


def _facts_of(plan: Plan) -> dict[str, Any]:
    config, card, ranges = plan.gateway, plan.gateway.card, plan.settings.quantization_ranges
    chat, stored = config.chat_template, Folder(Path(card.weights_folder)).optional("config.json")
    card_facts = {name: value for name, value in facts_of(card).items() if name not in _NOT_COUNTED}
    return {
        "format": _FORMAT,
        # The vectors of the dummy engine are not the model's.
        "is_dummy": plan.workers[0].is_dummy,
        "card": {**card_facts, "prompts": dict(card.prompts)},
        "files": _digests_of_files(card, plan.settings.cache_folder),
        "config": _without_names(stored),
        **({"sees_later": True} if sees_later_here(stored) else {}),
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


def _digests_of_files(card: ModelCard, cache_folder: Path) -> dict[str, list[str]]:
    """Of the weights in any order, because they may be cut into files of any name; of the steps in theirs."""
    of_queries = [] if card.sparse is None or not card.sparse.query_weights else [card.sparse.query_weights]
    others = [*card.step_files, *(Path(card.folder) / name for name in of_queries)]
    return {
        "weights": sorted(digest_of_file(path, cache_folder) for path in card.weight_files),
        "steps": [digest_of_file(path, cache_folder) for path in others],
    }
