"""API keys, from the settings and from a file of keys, as digests; and `vecd key`, which makes one.

Owns the format of `--api-keys` and of `--keys-file`, and every check on them. Keeps no key, and no message contains
one. Called by `vecd.launch.config.plan`; by `vecd.launch.processes` when the file has changed; and by
`vecd.launch.cli` for `vecd key`.
"""

import errno
import os
import re
import secrets
import stat
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from vecd.client.suggestions import closest
from vecd.gateway.types.config import PRIORITIES, SCOPES, ApiKey
from vecd.launch.base.exit_codes import EXIT_BAD_CONFIGURATION, EXIT_OK, ConfigurationError
from vecd.launch.config.models import names_configured
from vecd.launch.config.settings import Settings

MIN_KEY_CHARACTERS = 16
"""For keys in lists and files. A key of `vecd key` has 43: 256 bits."""

MAX_KEYS = 10_000
MAX_TOKENS_PER_S = 1e12
MIN_TOKENS_PER_S = 1e-3
MAX_REQUESTS = 10**9
_MAX_FILE_BYTES = 8 * 1024 * 1024
"""Enough for MAX_KEYS entries with every field and some comments."""

_NEW_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_OTHERS = 0o077
"""The bits of a file's mode that give access to others than its owner."""

_USAGE = """\
usage: vecd key NAME

Make an API key. It is printed once, with its entry for the file of --keys-file, which does not hold it.
NAME has 1 to 64 of the characters A-Z a-z 0-9 . _ -"""


def load_keys(settings: Settings) -> tuple[ApiKey, ...]:
    """Every key that clients may send; none when the server is open. Raises ConfigurationError with all problems: file,
    entry and field, and never a key."""
    found = _KeysRead(settings)
    if settings.api_key is not None:
        found.add("--api-key", ApiKey("default", _digest(settings.api_key.get_secret_value())))
    if settings.api_keys is not None:
        _read_list(settings.api_keys.get_secret_value(), found)
    if settings.keys_file is not None:
        _read_file(settings.keys_file, found)
    if len(found.keys) > MAX_KEYS:
        found.problems.append(f"there are {len(found.keys)} keys, at most {MAX_KEYS} may be")
    found.problems += _check_admin_listener(settings, found.keys)
    if found.problems:
        raise ConfigurationError(found.problems)
    return tuple(found.keys)


def main(arguments: Sequence[str]) -> int:
    """`vecd key NAME`. Returns the exit code."""
    if list(arguments) in (["--help"], ["-h"]):
        print(_USAGE)
        return EXIT_OK
    if len(arguments) != 1 or not _NAME.fullmatch(arguments[0]):
        print(_USAGE, file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    key = secrets.token_urlsafe(_NEW_KEY_BYTES)
    print(f"# the key, for its caller alone; it is shown only now:\n{key}\n\n# its entry in the keys file:\n[[keys]]")
    print(f'name = "{arguments[0]}"\nsha256 = "{_digest(key)}"\nscopes = ["embed"]')
    return EXIT_OK


def _check_admin_listener(settings: Settings, keys: Sequence[ApiKey]) -> list[str]:
    """While no key has the scope, it requires none: then only this machine may reach it."""
    if settings.admin_port is None or _is_loopback(settings.admin_host) or any("admin" in key.scopes for key in keys):
        return []
    return [
        f"--admin-host: {settings.admin_host} may be reached from other machines, and no key has the scope admin, "
        "which it would require: give a key that scope, or listen on 127.0.0.1"
    ]


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _KeysRead:
    """The keys that have been read, and the problems."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.keys: list[ApiKey] = []
        self.problems: list[str] = []
        self._places: dict[str, str] = {}

    def add(self, place: str, key: ApiKey) -> None:
        """`place`: where the key stands, for the operator to find it."""
        for field, value in (("name", f"name {key.name}"), ("key", f"key {key.digest}")):
            if (first := self._places.setdefault(value, place)) is not place:
                self.problems.append(f"{place}: {field}: is the same as that of {first}")
        self.keys.append(key)

    @cached_property
    def models(self) -> dict[str, str]:
        """By configured name, the model's own. Few servers have keys that need it."""
        return names_configured(self._settings)


# --- --api-keys -------------------------------------------------------------------------------------------------------


def _read_list(text: str, found: _KeysRead) -> None:
    """NAME=KEY,NAME=KEY. No part of it stands in a message: where a name is missing, what looks like one is the key."""
    for number, entry in enumerate(text.split(","), 1):
        place = f"--api-keys: entry {number}"
        name, equals, key = entry.strip().partition("=")
        if not equals:
            found.problems.append(f"{place}: must be NAME=KEY")
        elif problems := [*_check_name(name), *_check_key(key)]:
            found.problems += [f"{place}: {problem}" for problem in problems]
        else:
            found.add(place, ApiKey(name, _digest(key)))


# --- --keys-file ------------------------------------------------------------------------------------------------------


def _read_file(path: Path, found: _KeysRead) -> None:
    try:
        mode, content = _read_regular(path)
        document = tomllib.loads(content.decode())
    except OSError as error:
        found.problems.append(f"{path}: cannot be read: {error.strerror}")
        return
    except UnicodeDecodeError:
        found.problems.append(f"{path}: is not UTF-8")
        return
    except (ValueError, RecursionError) as error:  # also for numbers of too many digits, and lists in lists in lists
        # Only where: a message about a value may quote it.
        where = re.search(r"at (line \d+, column \d+|end of document)", str(error))
        found.problems.append(f"{path}: is not valid TOML{' at ' + where[1] if where else ''}")
        return
    for field in sorted(document.keys() - {"keys"}):
        found.problems.append(f"{path}: {_shown(field)}: is in no entry, and entries begin with [[keys]]")
    entries = document.get("keys", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        found.problems.append(f"{path}: keys: must be tables, each beginning with [[keys]]")
        return
    if not entries:
        # Not the same as no file: an operator who names a file wants the server to require keys.
        found.problems.append(f"{path}: has no keys; give it one (vecd key NAME makes it), or leave out --keys-file")
    if len(entries) > MAX_KEYS:
        found.problems.append(f"{path}: has {len(entries)} keys, at most {MAX_KEYS} may be")
        return
    if any("key" in entry for entry in entries) and mode & _OTHERS:
        found.problems.append(
            f"{path}: holds keys, and others than its owner have access to it (mode {mode & 0o777:03o}): "
            "chmod 600, or give the keys as sha256"
        )
    for number, entry in enumerate(entries, 1):
        _read_entry(f"{path}: entry {number}", entry, found)


def _read_regular(path: Path) -> tuple[int, bytes]:
    """A file's mode and content. Never waits for a writer, as reading a pipe would. Raises OSError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "It is not a regular file")
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"It has more than {_MAX_FILE_BYTES} bytes")
    return mode, content


def _read_entry(place: str, entry: dict[str, Any], found: _KeysRead) -> None:
    problems = [f"{_shown(field)}: there is no such field" for field in sorted(entry.keys() - _CHECKS.keys())]
    if "name" not in entry:
        problems.append("name: is missing")
    if ("key" in entry) == ("sha256" in entry):
        problems.append("key, sha256: one of the two is needed")
    for field, check in _CHECKS.items():
        if field in entry:
            problems += check(entry[field])
    if not problems and "models" in entry:
        problems = _check_configured(entry["models"], found.models)
    if problems:
        found.problems += [f"{place}: {problem}" for problem in problems]
        return
    limits = {field: value for field, value in entry.items() if field not in ("name", "key", "sha256", "scopes")}
    digest = _digest(entry["key"]) if "key" in entry else entry["sha256"].lower()
    scopes = tuple(scope for scope in SCOPES if scope in entry.get("scopes", SCOPES))
    if "models" in entry:
        limits["models"] = tuple(dict.fromkeys(found.models[name] for name in entry["models"]))
    found.add(place, ApiKey(entry["name"], digest, scopes, **limits))


def _check_name(name: object) -> list[str]:
    is_right = isinstance(name, str) and _NAME.fullmatch(name)
    return [] if is_right else ["name: must have 1 to 64 of the characters A-Z a-z 0-9 . _ -"]


def _check_key(key: object) -> list[str]:
    if not isinstance(key, str) or not key.isprintable() or " " in key:
        return ["key: must be a string of printable characters without spaces"]
    if len(key) < MIN_KEY_CHARACTERS:
        return [f"key: has {len(key)} characters, at least {MIN_KEY_CHARACTERS} are needed (vecd key NAME makes one)"]
    return []


def _check_digest(digest: object) -> list[str]:
    is_right = isinstance(digest, str) and _DIGEST.fullmatch(digest)
    return [] if is_right else ["sha256: must be the 64 hexadecimal digits of the key's SHA-256"]


def _check_scopes(scopes: object) -> list[str]:
    is_right = isinstance(scopes, list) and scopes and all(scope in SCOPES for scope in scopes)
    return [] if is_right else [f"scopes: must be a list of one or more of {', '.join(SCOPES)}"]


def _check_max_priority(priority: object) -> list[str]:
    return [] if priority in PRIORITIES else [f"max_priority: must be one of {', '.join(PRIORITIES)}"]


def _check_tokens_per_s(rate: object) -> list[str]:
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if is_number and MIN_TOKENS_PER_S <= rate <= MAX_TOKENS_PER_S:  # type: ignore[operator]
        return []
    return [f"tokens_per_s: must be a number from {MIN_TOKENS_PER_S:g} to {MAX_TOKENS_PER_S:.0f}"]


def _check_max_requests(limit: object) -> list[str]:
    is_right = isinstance(limit, int) and not isinstance(limit, bool) and 1 <= limit <= MAX_REQUESTS
    return [] if is_right else [f"max_requests: must be a whole number from 1 to {MAX_REQUESTS}"]


def _check_models(names: object) -> list[str]:
    is_right = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    return [] if is_right else ['models: must be a list of one or more names of models, ["NAME"]']


def _check_configured(names: Sequence[str], configured: Mapping[str, str]) -> list[str]:
    """The names are not shown: what is no name may be a key in the wrong place."""
    problems = []
    for number, name in enumerate(names, 1):
        if name not in configured:
            meant = closest(name, configured)
            hint = f"did you mean {meant}?" if meant else f"there are {', '.join(configured)}"
            problems.append(f"models: name {number}: is neither that nor an alias of a configured model; {hint}")
    return problems


_CHECKS: dict[str, Callable[[object], list[str]]] = {
    "name": _check_name,
    "key": _check_key,
    "sha256": _check_digest,
    "scopes": _check_scopes,
    "max_priority": _check_max_priority,
    "tokens_per_s": _check_tokens_per_s,
    "max_requests": _check_max_requests,
    "models": _check_models,
}
"""The fields of an entry."""


def _shown(field: str) -> str:
    """A field's name, unless it is long enough to be a key in the wrong place."""
    return field if len(field) < MIN_KEY_CHARACTERS else f"a field with a name of {len(field)} characters"


def _digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()
