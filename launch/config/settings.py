"""Reads the settings of `vecd serve`: flags, environment, `.env` and TOML files, checked together.

A flag wins over the environment (`VECD_*`), that over `.env`, that over the file named by `--config`, that over the
default. What the settings are is declared in `vecd.shm.settings`. What the sources say about several models is only
collected here (`GivenSettings`). `python -m vecd.launch.config.settings` prints the table of docs/operating.md.
"""

import logging
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from dotenv.parser import parse_stream

from vecd.base import logs
from vecd.base.failures import ConfigurationError
from vecd.base.flags import Command, FieldValues, Secret, closest, flag_hints, flag_name, flags_in
from vecd.gateway.http.forwarded import TrustedProxies
from vecd.shm.settings import GivenSettings, Settings

ENV_PREFIX = "VECD_"
SETTINGS = flags_in(Settings)

logging.getLogger("dotenv").setLevel(logging.ERROR)  # `_read_dotenv` names the lines that it cannot parse

_COMMAND = Command(
    "vecd serve",
    "Serve models over HTTP. Each flag is also VECD_FLAG in the environment and in .env, and a line of the --config "
    "file.",
    "vecd serve [MODEL ...] [--flags]",
)
_SECRETS = {name for name, (kind, _) in SETTINGS.items() if kind == Secret | None}
_OF_CLIENTS = ("url",)
_UNUSED_BESIDE = {"uds": ("host", "port"), "admin_uds": ("admin_host", "admin_port")}
_NAMES_OF_MODEL = ("--model", "--model-id", "--model-name", "--model-name-or-path", "--model-path")
RETIRED_FLAGS = {
    "--engine weightless": "the engine is called dummy",
    "--gateways auto": "give a number; 1 suffices until its process takes most of a core",
    "--proxy-protocol": "have the proxy send Forwarded or X-Forwarded-For, and see --trusted-proxies",
    "--tei-metrics": "deploy/tei-recording-rules.yaml has rules for Prometheus",
}
_INSTEAD = dict.fromkeys(_NAMES_OF_MODEL, "MODEL is positional: vecd serve MODEL") | RETIRED_FLAGS


def load_settings(argv: Sequence[str], *, without: Sequence[str] = (), beside: FieldValues | None = None) -> Settings:
    """Settings from flags, environment, `.env` and TOML, but for those named in `without`. Prints help and exits 0 for
    `--help`. `beside`: of the caller's own flags, which are no longer in `argv`; their problems are told, too. Raises
    ConfigurationError with every problem."""
    found = FieldValues(SETTINGS)
    others = {} if beside is None else beside.flags
    found.problems += [] if beside is None else beside.problems
    if unknown := found.add_argv(argv, _COMMAND):
        found.problems.append(f"unrecognized arguments: {' '.join(unknown)}{_hints(unknown, others)}")
    if isinstance(models := found.given.get("model"), list) and len(models) == 1:
        [found.given["model"]] = models
    found.add(_variables("", os.environ, found.problems), _variable)
    dotenv = _variables(".env: ", _read_dotenv(found.problems), found.problems)
    found.add(dotenv, lambda name: f".env: {_variable(name)}")
    given = GivenSettings()
    if config := found.given.get("config"):
        given = _read_toml(Path(config), found)
    for name in without:
        found.given.pop(name, None)
    models = _take_models(found)
    values = read_settings(found)
    if found.problems:
        raise ConfigurationError(*found.problems)
    for used, unused in _UNUSED_BESIDE.items():
        for name in unused:
            if used in values and name in values:
                origin, reason = found.origins[name], found.origins[used]
                logs.say(f"warning: {origin} is ignored, because {reason} is given", logging.WARNING)
    origin = found.origins.get("model", "")
    return Settings(**values, given=replace(given, names=tuple(values), models=models, origin=origin))


def read_settings(found: FieldValues) -> dict[str, Any]:
    """The values as the fields have them. Side effect: adds the problems."""
    values = found.read(RETIRED_FLAGS)
    if proxies := values.get("trusted_proxies"):
        try:
            TrustedProxies(proxies)
        except ValueError as error:
            found.problems.append(f"{found.origins['trusted_proxies']}: {error} (given: {proxies!r})")
    return {name: value.absolute() if isinstance(value, Path) else value for name, value in values.items()}


def _take_models(found: FieldValues) -> tuple[str, ...]:
    """Side effect: where the setting is a list, its first takes the list's place."""
    given = found.given.get("model")
    if not isinstance(given, list):
        return (given,) if given and isinstance(given, str) else ()
    if not all(source and isinstance(source, str) and "\0" not in source for source in given):
        found.problems.append(
            f"{found.origins['model']}: must be the folder or id of a model, or a list of such (given: {given!r})"
        )
    found.given["model"] = str(given[0]) if given and not found.problems else ""
    return tuple(given)


# --- the sources ------------------------------------------------------------------------------------------------


def _read_toml(path: Path, found: FieldValues) -> GivenSettings:
    try:
        written = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        found.problems.append(f"{path}: cannot be read: {error}")
        return GivenSettings()
    given = GivenSettings(tables=written.pop("models", None), file=str(path))
    found.add_table(written, str(path), _why_not)
    return given


def _why_not(key: str) -> str:
    name = key.replace("-", "_")
    return f"{name}: there is no such setting{_guess(name, str)}"


def _read_dotenv(problems: list[str]) -> Mapping[str, str]:
    """A line that is not NAME=VALUE is named, but not quoted, because it may have a key: a problem if it may be meant
    for vecd, else a warning."""
    try:
        text = Path(".env").read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        problems.append(f".env: cannot be read: {why}")
        return {}
    for binding in parse_stream(StringIO(text)):
        if binding.error:
            statement = binding.original.string
            num_blank = statement[: -len(statement.lstrip())].count("\n")
            where = f".env: line {binding.original.line + num_blank}: is not NAME=VALUE"
            if ENV_PREFIX in statement:
                problems.append(where)
            else:
                logs.say(f"warning: {where}, and is ignored", logging.WARNING)
    return {name: value or "" for name, value in dotenv_values(stream=StringIO(text)).items()}


def _variables(origin: str, environ: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    """The settings in variables. An empty one counts as unset: a compose file passes on unset variables as empty
    ones."""
    found = {}
    for variable, value in environ.items():
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        name = variable[len(ENV_PREFIX) :].lower()
        if _is_service_link(name, value) or name in _OF_CLIENTS:
            continue
        if name not in SETTINGS:
            problems.append(f"{origin}{variable}: there is no such setting{_guess(name, _variable)}")
        elif value:
            found[name] = value
        elif name in _SECRETS:
            # Not the same as unset: an operator who wanted to set a key must not get an open server.
            problems.append(f"{origin}{variable}: is empty; give it a key, or remove it")
    return found


def _is_service_link(name: str, value: str) -> bool:
    """Kubernetes puts VECD_PORT=tcp://… and VECD_SERVICE_… into every pod beside a Service that is called vecd."""
    return (name == "port" and value.startswith("tcp://")) or name.startswith(("service_", "port_"))


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _hints(unknown: Sequence[str], other_flags: Iterable[str]) -> str:
    words = [word.partition("=")[0] for word in unknown]
    known = [f"; {word}: {_INSTEAD[word]}" for word in words if word in _INSTEAD]
    others = [word for word in words if word not in _INSTEAD]
    return "".join(known) + flag_hints(others, [*map(flag_name, (*other_flags, *SETTINGS))])


def _guess(name: str, write: Callable[[str], str]) -> str:
    """What serves instead of the setting `name`, or which may have been meant; empty if it is like none."""
    if (instead := RETIRED_FLAGS.get(flag_name(name))) is not None:
        return f"; {instead}"
    meant = closest(name, SETTINGS)
    return f"; did you mean {write(meant)}?" if meant else ""


def flag_table() -> str:
    lines = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for each in fields(Settings):
        if each.name in SETTINGS:
            flag = flag_name(each.name, SETTINGS[each.name][1])
            default = "" if each.default in (None, "") else f"`{each.default}`"
            lines.append(f"| `{flag}` | {default} | {SETTINGS[each.name][1].help} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(flag_table())
