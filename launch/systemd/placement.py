"""What `vecd install-service` writes, and where: this installation's command line, its settings as TOML, its units.

Owns the choice of paths, and the check that the service's user can read what it needs. Writes nothing. Called by
`vecd.launch.systemd.install_service`.
"""

import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.base.programs import command_of
from vecd.launch.config.settings import Settings
from vecd.launch.systemd.units import DEFAULT_LISTEN, service_unit, socket_unit

SERVICE, SOCKET = "vecd.service", "vecd.socket"
_HOMES = tuple(map(Path, ("/home", "/root", "/run/user")))
"""What ProtectHome= hides."""
_SECRET = ("api_key", "api_keys")
_PATHS = ("tls_cert", "tls_key", "keys_file", "quantization_ranges")
_EMPTY_CONFIG = "# Settings of vecd.service: a line for each flag of `vecd serve`, as port = 9000.\n"


@dataclass(frozen=True, slots=True)
class Place:
    """Where units and settings are."""

    units: Path
    config: Path
    is_of_user: bool
    root: Path
    """What the paths begin with on this machine, and not in the units."""

    def on_disk(self, path: Path) -> Path:
        return self.root / path.relative_to("/")


def place_of(*, is_of_user: bool, root: Path | None = None, environ: Mapping[str, str] = os.environ) -> Place:
    """Of the system's systemd, or of this user's own."""
    root = root or Path("/")
    if not is_of_user:
        return Place(Path("/etc/systemd/system"), Path("/etc/vecd.toml"), False, root)
    home = environ.get("XDG_CONFIG_HOME", "")
    folder = Path(home) if home.startswith("/") else Path.home() / ".config"
    return Place(folder / "systemd/user", folder / "vecd/vecd.toml", True, root)


def own_command() -> list[str]:
    """The command line of `vecd`, as it is installed here. Nothing in it depends on the search path."""
    if getattr(sys, "frozen", False):
        return [sys.executable]
    script = Path(sys.executable).parent / "vecd"
    if os.access(script, os.X_OK):
        return [str(script)]
    return command_of("vecd")


def contents(
    place: Place, settings: Settings, *, has_socket: bool, run_as: str | None, command: list[str]
) -> dict[Path, str]:
    """The text of each file, by path. `settings` has those that were given, and no others, in `model_fields_set`.

    Raises ConfigurationError.
    """
    given = {name: getattr(settings, name) for name in Settings.model_fields if name in settings.model_fields_set}
    if "model" in given:
        given["model"] = _absolute(given["model"])
    problems = _unfit(given, place)
    needed = _needed(given, command)
    if run_as is None and not place.is_of_user:
        problems += filter(None, map(_closed_to_others, needed))
    if problems:
        raise ConfigurationError(problems)
    listen = _listen(given) if has_socket else DEFAULT_LISTEN
    try:
        service = service_unit(
            command,
            str(place.config),
            is_of_user=place.is_of_user,
            run_as=run_as,
            is_in_home=any(path.is_relative_to(home) for path in needed for home in _HOMES),
        )
        sockets = {place.units / SOCKET: socket_unit(listen)} if has_socket else {}
    except ValueError as error:
        raise ConfigurationError([str(error)]) from None
    return {place.config: to_toml(given), place.units / SERVICE: service, **sockets}


def to_toml(given: Mapping[str, object]) -> str:
    """Lines of the --config file."""
    if not given:
        return _EMPTY_CONFIG
    return "".join(f"{name.replace('_', '-')} = {_toml_value(value)}\n" for name, value in given.items())


def _toml_value(value: object) -> str:
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _absolute(model: str) -> str:
    """A folder's path, and a hub id as it is; the service has another working directory."""
    path = Path(model).expanduser()
    if path.is_dir() or model.startswith((".", "/", "~")):
        return str(path.absolute())
    return model


def _unfit(given: Mapping[str, object], place: Place) -> list[str]:
    """Settings that do not belong into a service's file."""
    problems = [
        f"--{name.replace('_', '-')}: would stand in {place.config}, which others can read: use --keys-file"
        for name in _SECRET
        if name in given
    ]
    problems += [f"--{name}: is the service's own" for name in ("config", "ready_fd") if name in given]
    model = str(given.get("model", ""))
    if model.startswith("/") and not Path(model).is_dir():
        problems.append(f"MODEL: there is no folder {model}")
    return problems


def _listen(given: dict[str, object]) -> str:
    """The socket unit's address, of settings that must not be the service's then. Side effect: takes them away."""
    host, port, uds = (given.pop(name, None) for name in ("host", "port", "uds"))
    if uds is not None:
        return str(uds)
    default_host, _, default_port = DEFAULT_LISTEN.partition(":")
    host = str(host or default_host)
    if not re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]+", host):
        raise ConfigurationError([f"--host: systemd listens on addresses, not on names (given: {host!r})"])
    port = default_port if port is None else port
    if port == 0:
        raise ConfigurationError(["--port: a socket unit needs a port of its own (given: 0)"])
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _needed(given: Mapping[str, object], command: list[str]) -> list[Path]:
    """What the service must be able to read: the program, Python, its code, and the files that settings name."""
    paths = [Path(command[0]), Path(sys.executable).resolve(), Path(__file__).resolve()]
    paths += [Path(str(given[name])) for name in _PATHS if name in given]
    model = str(given.get("model", ""))
    return [*paths, Path(model)] if model.startswith("/") else paths


def _closed_to_others(path: Path) -> str:
    """Why a user that systemd makes up cannot read the path; "" if it can."""
    resolved = path.resolve()
    for part in (*reversed(resolved.parents), resolved):
        try:
            mode = part.stat().st_mode
        except OSError as error:
            return f"{path}: {error.strerror}"
        wanted = stat.S_IXOTH if part != resolved else stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
        if mode & wanted != wanted:
            return (
                f"{path}: the service's user cannot read it, because {part} is closed to others (mode "
                f"{stat.S_IMODE(mode):04o}): put it elsewhere, as below /opt, or give --run-as USER"
            )
    return ""
