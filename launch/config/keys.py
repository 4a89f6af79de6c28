"""API keys, from the settings and from a file of keys, as digests; and `vecd key`, which makes one.

Owns the format of `--api-keys` and of `--keys-file`. Keeps no key, and no message contains one.
"""

import errno
import os
import re
import secrets
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from vecd.base.failures import EXIT_BAD_CONFIGURATION, EXIT_OK, ConfigurationError
from vecd.base.files import JsonObject, open_regular
from vecd.base.flags import FieldValues, Rules, did_you_mean, flags_in
from vecd.gateway.config import ApiKey
from vecd.launch.config.models import names_configured
from vecd.shm.settings import Settings

MIN_KEY_CHARACTERS = 16
"""For keys in lists and files. A key of `vecd key` has 43: 256 bits."""

MAX_KEYS = 10_000
_MAX_FILE_BYTES = 8 * 1024 * 1024

_NEW_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_OTHERS = 0o077

_MUST_BE_A_KEY = "must be a string of printable characters without spaces"


def _key(key: str) -> str:
    if not key.isprintable() or " " in key:
        raise ValueError(_MUST_BE_A_KEY)
    if len(key) < MIN_KEY_CHARACTERS:
        raise ValueError(
            f"has {len(key)} characters, at least {MIN_KEY_CHARACTERS} are needed (vecd key NAME makes one)"
        )
    return key


_USAGE = """\
usage: vecd key NAME

Make an API key. It is printed once, with its entry for the file of --keys-file, which does not hold it.
NAME has 1 to 64 of the characters A-Z a-z 0-9 . _ -"""


_FIELDS = {
    "name": (
        str,
        Rules(help="the tenant's", pattern=_NAME, must="must have 1 to 64 of the characters A-Z a-z 0-9 . _ -"),
    ),
    "key": (str, Rules(help="itself", read=_key, must=_MUST_BE_A_KEY)),
    "sha256": (
        str,
        Rules(help="or its digest", pattern=_DIGEST, must="must be the 64 hexadecimal digits of the key's SHA-256"),
    ),
    **flags_in(ApiKey),
}
"""Of an entry in the file of keys. One of --api-keys has a name and a key."""


def load_keys(settings: Settings) -> tuple[ApiKey, ...]:
    """Every key that clients may send; none when the server is open. Raises ConfigurationError with all problems, and
    never with a key."""
    problems: list[str] = []
    found: list[tuple[str, ApiKey]] = []
    if settings.api_key is not None:
        found.append(("--api-key", ApiKey("default", _digest(settings.api_key.value))))
    entries = [] if settings.api_keys is None else list(_listed(settings.api_keys.value, problems))
    entries += [] if settings.keys_file is None else _read_file(settings.keys_file, problems)
    configured = names_configured(settings) if any("models" in entry for _, entry in entries) else {}
    for place, entry in entries:
        found += [(place, key) for key in _read_entry(place, entry, configured, problems)]
    places: dict[str, str] = {}
    for place, key in found:
        for field, value in (("name", f"name {key.name}"), ("key", f"key {key.digest}")):
            if (first := places.setdefault(value, place)) is not place:
                problems.append(f"{place}: {field}: is the same as that of {first}")
    keys = tuple(key for _, key in found)
    if len(keys) > MAX_KEYS:
        problems.append(f"there are {len(keys)} keys, at most {MAX_KEYS} may be")
    problems += _check_admin_listener(settings, keys)
    if problems:
        raise ConfigurationError(*problems)
    return keys


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


# --- the entries -----------------------------------------------------------------------------------------------------


def _listed(text: str, problems: list[str]) -> Iterator[tuple[str, JsonObject]]:
    """NAME=KEY,NAME=KEY. No part of it stands in a message: where a name is missing, what looks like one is the key."""
    for number, entry in enumerate(text.split(","), 1):
        place = f"--api-keys: entry {number}"
        name, equals, key = entry.strip().partition("=")
        if equals:
            yield place, {"name": name, "key": key}
        else:
            problems.append(f"{place}: must be NAME=KEY")


def _read_file(path: Path, problems: list[str]) -> list[tuple[str, JsonObject]]:
    try:
        with open_regular(path) as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"has more than {_MAX_FILE_BYTES} bytes")
        document = tomllib.loads(content.decode())
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
        return []
    except UnicodeDecodeError:
        problems.append(f"{path}: is not UTF-8")
        return []
    except (ValueError, RecursionError) as error:  # also for numbers of too many digits, and lists in lists in lists
        # Only where: a message about a value may quote it.
        where = re.search(r"at (line \d+, column \d+|end of document)", str(error))
        problems.append(f"{path}: is not valid TOML{' at ' + where[1] if where else ''}")
        return []
    others = sorted(document.keys() - {"keys"})
    problems += [f"{path}: {_shown(field)}: is in no entry, and entries begin with [[keys]]" for field in others]
    entries = document.get("keys", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        problems.append(f"{path}: keys: must be tables, each beginning with [[keys]]")
        return []
    if not entries:
        # Not the same as no file: an operator who names a file wants the server to require keys.
        problems.append(f"{path}: has no keys; give it one (vecd key NAME makes it), or leave out --keys-file")
    if len(entries) > MAX_KEYS:
        problems.append(f"{path}: has {len(entries)} keys, at most {MAX_KEYS} may be")
        return []
    if any("key" in entry for entry in entries) and mode & _OTHERS:
        problems.append(
            f"{path}: holds keys, and others than its owner have access to it (mode {mode & 0o777:03o}): "
            "chmod 600, or give the keys as sha256"
        )
    return [(f"{path}: entry {number}", entry) for number, entry in enumerate(entries, 1)]


def _read_entry(place: str, entry: JsonObject, configured: Mapping[str, str], problems: list[str]) -> Iterator[ApiKey]:
    """None of it if there are problems. `configured`: as `names_configured` has them."""
    found = FieldValues(_FIELDS, shows_values=False)
    found.add_table(entry, place, lambda field: f"{_shown(field)}: there is no such field")
    if "name" not in entry:
        found.problems.append(f"{place}: name: is missing")
    if ("key" in entry) == ("sha256" in entry):
        found.problems.append(f"{place}: key, sha256: one of the two is needed")
    read = found.read()
    names = read.get("models", ())
    if not found.problems:
        found.problems += [f"{place}: models: {problem}" for problem in _check_configured(names, configured)]
    problems += found.problems
    if not found.problems:
        if names:
            read["models"] = tuple(dict.fromkeys(configured[name] for name in names))
        digest = read.pop("sha256").lower() if "sha256" in read else _digest(read.pop("key"))
        yield ApiKey(digest=digest, **read)


def _check_configured(names: Sequence[str], configured: Mapping[str, str]) -> Iterator[str]:
    """The names are not shown: what is no name may be a key in the wrong place."""
    for number, name in enumerate(names, 1):
        if name not in configured:
            hint = did_you_mean(name, configured) or f"; there are {', '.join(configured)}"
            yield f"name {number}: is neither that nor an alias of a configured model{hint}"


def _shown(field: str) -> str:
    """A field's name, unless it is long enough to be a key in the wrong place."""
    return field if len(field) < MIN_KEY_CHARACTERS else f"a field with a name of {len(field)} characters"


def _digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()
