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
from vecd.launch.config.models import split_source
from vecd.launch.config.settings import Settings
from vecd.launch.systemd.unit_files import DEFAULT_LISTEN, SERVICE, SOCKET, service_unit, socket_unit

_HOMES = tuple(map(Path, ("/home", "/root", "/run/user")))
"""What ProtectHome= hides."""
_SECRET = ("api_key", "api_keys")
_PATHS = ("tls_cert", "tls_key", "keys_file", "quantization_ranges")
_EMPTY_CONFIG = "# Settings of vecd.service: a line for each flag of `vecd serve`, as port = 9000.\n"


@dataclass(frozen=True, slots=True)
class InstallPaths:
    """Where units and settings are."""

    units: Path
    config: Path
    is_of_user: bool
    root: Path
    """Prefix of the paths on this machine; the units have them without it."""

    def on_disk(self, path: Path) -> Path:
        return self.root / path.relative_to("/")


def paths_of(*, is_of_user: bool, root: Path | None = None) -> InstallPaths:
    """The paths of the system's systemd, or of this user's own."""
    root = root or Path("/")
    if not is_of_user:
        return InstallPaths(Path("/etc/systemd/system"), Path("/etc/vecd.toml"), False, root)
    home = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(home) if home.startswith("/") else Path.home() / ".config"
    return InstallPaths(folder / "systemd/user", folder / "vecd/vecd.toml", True, root)


def own_command() -> list[str]:
    """The command line of `vecd`, as it is installed here. Nothing in it depends on the search path."""
    if getattr(sys, "frozen", False):
        return [sys.executable]
    script = Path(sys.executable).parent / "vecd"
    return [str(script)] if os.access(script, os.X_OK) else command_of("vecd")


def contents(
    paths: InstallPaths, settings: Settings, *, has_socket: bool, run_as: str | None, command: list[str]
) -> dict[Path, str]:
    """The text of each file, by path. Only settings in `model_fields_set` are written. Raises ConfigurationError."""
    given = {name: getattr(settings, name) for name in Settings.model_fields if name in settings.model_fields_set}
    if sources := list(map(_absolute, settings.given_models.sources)):
        given["model"] = sources if len(sources) > 1 else sources[0]
    needed = _needed(given, command)
    problems = _unfit(given, paths)
    if run_as is None and not paths.is_of_user:
        problems += filter(None, map(_closed_to_others, needed))
    if problems:
        raise ConfigurationError(problems)
    is_in_home = any(path.is_relative_to(home) for path in needed for home in _HOMES)
    files: dict[Path, str] = {}
    try:
        if has_socket:  # which takes its settings out of those of the service
            files[paths.units / SOCKET] = socket_unit(_take_listen(given))
        files[paths.units / SERVICE] = service_unit(
            command, str(paths.config), is_of_user=paths.is_of_user, run_as=run_as, is_in_home=is_in_home
        )
    except ValueError as error:
        raise ConfigurationError([str(error)]) from None
    return {paths.config: to_toml(given), **files}


def _absolute(argument: str) -> str:
    """[NAME=]MODEL with the path of a folder from the root: the service has another working directory."""
    name, model = split_source(argument)
    folder = Path(model).expanduser()
    if model and (folder.is_dir() or model.startswith((".", "/", "~"))):
        model = str(folder.absolute())
    return f"{name}={model}" if name else model


def _folders(given: Mapping[str, object]) -> list[Path]:
    """Those of the models that are folders, which need not exist."""
    model = given.get("model", "")
    models = [split_source(str(each))[1] for each in (model if isinstance(model, list) else [model])]
    return [Path(model) for model in models if model.startswith("/")]


def to_toml(given: Mapping[str, object]) -> str:
    """Lines of the --config file."""
    lines = [f"{name.replace('_', '-')} = {_toml_value(value)}\n" for name, value in given.items()]
    return "".join(lines) or _EMPTY_CONFIG


def _toml_value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON's numbers, booleans and strings are TOML's, but for one character.
    plain = value if isinstance(value, bool | int | float) else str(value)
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


def _unfit(given: Mapping[str, object], paths: InstallPaths) -> list[str]:
    """Why settings must not stand in a service's file."""
    problems = [
        f"--{name.replace('_', '-')}: would stand in {paths.config}, which others can read: use --keys-file"
        for name in _SECRET
        if name in given
    ]
    problems += [f"--{name}: is the service's own" for name in ("config", "ready_fd") if name in given]
    problems += [f"MODEL: there is no folder {folder}" for folder in _folders(given) if not folder.is_dir()]
    return problems


def _take_listen(given: dict[str, object]) -> str:
    """The socket unit's address. Side effect: removes the settings that it is made of. Raises ConfigurationError."""
    host, port, uds = (given.pop(name, None) for name in ("host", "port", "uds"))
    if uds is not None:
        return str(uds)
    default_host, _, default_port = DEFAULT_LISTEN.partition(":")
    host = str(host or default_host)
    if not re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]+", host):
        raise ConfigurationError([f"--host: systemd listens on addresses, not on names (given: {host!r})"])
    if port == 0:
        raise ConfigurationError(["--port: a socket unit needs a port of its own (given: 0)"])
    return f"{f'[{host}]' if ':' in host else host}:{port or default_port}"


def _needed(given: Mapping[str, object], command: list[str]) -> list[Path]:
    """What the service must be able to read: the program, Python, its code, and the files that settings name."""
    paths = [Path(command[0]), Path(sys.executable).resolve(), Path(__file__).resolve()]
    paths += [Path(str(given[name])) for name in _PATHS if name in given]
    return [*paths, *_folders(given)]


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
