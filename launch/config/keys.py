"""API keys, from the settings and from a file of keys, as digests; and `vecd key`, which makes one.

Owns the format of `--api-keys` and of `--keys-file`. Keeps no key, and no message contains one.
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

from vecd.base.failures import EXIT_BAD_CONFIGURATION, EXIT_OK, ConfigurationError
from vecd.base.flags import closest
from vecd.gateway.config import PRIORITIES, SCOPES, ApiKey
from vecd.launch.config.models import names_configured
from vecd.shm.settings import Settings

MIN_KEY_CHARACTERS = 16
"""For keys in lists and files. A key of `vecd key` has 43: 256 bits."""

MAX_KEYS = 10_000
MAX_TOKENS_PER_S = 1e12
MIN_TOKENS_PER_S = 1e-3
MAX_REQUESTS = 10**9
_MAX_FILE_BYTES = 8 * 1024 * 1024

_NEW_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_OTHERS = 0o077

_USAGE = """\
usage: vecd key NAME

Make an API key. It is printed once, with its entry for the file of --keys-file, which does not hold it.
NAME has 1 to 64 of the characters A-Z a-z 0-9 . _ -"""


def load_keys(settings: Settings) -> tuple[ApiKey, ...]:
    """Every key that clients may send; none when the server is open. Raises ConfigurationError with all problems, and
    never with a key."""
    found = _KeysRead(settings)
    if settings.api_key is not None:
        found.add("--api-key", ApiKey("default", _digest(settings.api_key.value)))
    if settings.api_keys is not None:
        _read_list(settings.api_keys.value, found)
    if settings.keys_file is not None:
        _read_file(settings.keys_file, found)
    if len(found.keys) > MAX_KEYS:
        found.problems.append(f"there are {len(found.keys)} keys, at most {MAX_KEYS} may be")
    found.problems += _check_admin_listener(settings, found.keys)
    if found.problems:
        raise ConfigurationError(*found.problems)
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
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.keys: list[ApiKey] = []
        self.problems: list[str] = []
        self._places: dict[str, str] = {}

    def add(self, place: str, key: ApiKey) -> None:
        for field, value in (("name", f"name {key.name}"), ("key", f"key {key.digest}")):
            if (first := self._places.setdefault(value, place)) is not place:
                self.problems.append(f"{place}: {field}: is the same as that of {first}")
        self.keys.append(key)

    @cached_property
    def models(self) -> dict[str, str]:
        """By configured name, the model's own."""
        return names_configured(self._settings)


# --- --api-keys -------------------------------------------------------------------------------------------------------


def _read_list(text: str, found: _KeysRead) -> None:
    """NAME=KEY,NAME=KEY. No part of it stands in a message: where a name is missing, what looks like one is the key."""
    for number, entry in enumerate(text.split(","), 1):
        place = f"--api-keys: entry {number}"
        name, equals, key = entry.strip().partition("=")
        if not equals:
            found.problems.append(f"{place}: must be NAME=KEY")
        elif problems := [*_problems_of("name", name), *_problems_of("key", key)]:
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
    problems += [problem for field in _CHECKS if field in entry for problem in _problems_of(field, entry[field])]
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


def _is_number(value: object, least: float, largest: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= largest


_CHECKS: dict[str, tuple[Callable[[Any], object], str]] = {
    "name": (
        lambda name: isinstance(name, str) and _NAME.fullmatch(name),
        "must have 1 to 64 of the characters A-Z a-z 0-9 . _ -",
    ),
    "key": (
        lambda key: isinstance(key, str) and key.isprintable() and " " not in key,
        "must be a string of printable characters without spaces",
    ),
    "sha256": (
        lambda digest: isinstance(digest, str) and _DIGEST.fullmatch(digest),
        "must be the 64 hexadecimal digits of the key's SHA-256",
    ),
    "scopes": (
        lambda scopes: isinstance(scopes, list) and scopes and all(scope in SCOPES for scope in scopes),
        f"must be a list of one or more of {', '.join(SCOPES)}",
    ),
    "max_priority": (lambda priority: priority in PRIORITIES, f"must be one of {', '.join(PRIORITIES)}"),
    "tokens_per_s": (
        lambda rate: _is_number(rate, MIN_TOKENS_PER_S, MAX_TOKENS_PER_S),
        f"must be a number from {MIN_TOKENS_PER_S:g} to {MAX_TOKENS_PER_S:.0f}",
    ),
    "max_requests": (
        lambda limit: isinstance(limit, int) and _is_number(limit, 1, MAX_REQUESTS),
        f"must be a whole number from 1 to {MAX_REQUESTS}",
    ),
    "models": (
        lambda names: isinstance(names, list) and names and all(isinstance(name, str) for name in names),
        'must be a list of one or more names of models, ["NAME"]',
    ),
}


def _problems_of(field: str, value: Any) -> list[str]:
    is_right, what = _CHECKS[field]
    if not is_right(value):
        return [f"{field}: {what}"]
    if field == "key" and len(value) < MIN_KEY_CHARACTERS:
        return [f"key: has {len(value)} characters, at least {MIN_KEY_CHARACTERS} are needed (vecd key NAME makes one)"]
    return []


def _check_configured(names: Sequence[str], configured: Mapping[str, str]) -> list[str]:
    """The names are not shown: what is no name may be a key in the wrong place."""
    problems = []
    for number, name in enumerate(names, 1):
        if name not in configured:
            meant = closest(name, configured)
            hint = f"did you mean {meant}?" if meant else f"there are {', '.join(configured)}"
            problems.append(f"models: name {number}: is neither that nor an alias of a configured model; {hint}")
    return problems


def _shown(field: str) -> str:
    """A field's name, unless it is long enough to be a key in the wrong place."""
    return field if len(field) < MIN_KEY_CHARACTERS else f"a field with a name of {len(field)} characters"


def _digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()
