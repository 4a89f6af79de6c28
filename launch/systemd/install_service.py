"""`vecd install-service`: has systemd run this very installation.

Fills its paths into the units of deploy/, which are links in `data`, installs and starts them.
"""

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from vecd.base.failures import EXIT_BAD_CONFIGURATION, EXIT_COULD_NOT_START, EXIT_OK, ConfigurationError
from vecd.base.flags import Command, flag, parse
from vecd.base.programs import command_of

SERVICE, SOCKET = "vecd.service", "vecd.socket"
_MADE_BY = b"# Made by `vecd install-service`"
_Run: TypeAlias = Callable[[list[str]], int]


_COMMAND = Command(
    "vecd install-service",
    "Have systemd keep a server running.",
    hint="; the settings are in /etc/vecd.toml, or with --user in ~/.config/vecd/vecd.toml",
)


@dataclass(frozen=True, kw_only=True)
class InstallOptions:
    socket: bool = flag(False, "also vecd.socket: systemd listens")
    user: bool = flag(False, "for this user's own systemd, without root")
    run_as: str | None = flag(None, "run as this user; default: one that systemd makes up", word="USER")
    print: bool = flag(False, "print the units, and write nothing")
    remove: bool = flag(False, "stop and remove the units; the settings stay")


def main(
    arguments: Sequence[str], root: Path = Path("/"), program: Sequence[str] = (), run: _Run = subprocess.call
) -> int:
    """Returns the exit code: 2 for what cannot be done as given, 3 when writing or systemctl failed. `root`: files are
    written below it. `program`: `vecd` on the service's command line. `run`: runs systemctl."""
    options = parse(InstallOptions, arguments, _COMMAND)
    folder, config = Path("/etc/systemd/system"), Path("/etc/vecd.toml")
    names = [] if options.remove else [SOCKET, SERVICE] if options.socket else [SERVICE]

    def systemctl(*command: str) -> None:
        if run(line := ["systemctl", *(["--user"] if options.user else []), *command]):
            raise OSError(f"failed: {' '.join(line)}")

    try:
        if options.user:
            home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config").absolute()
            folder, config = home / "systemd/user", home / "vecd/vecd.toml"
        texts = {name: _unit(name, program or own_program(), config, options) for name in names}
        if options.print:
            print("\n".join(texts.values()), end="")
        else:
            _change(texts, root / folder.relative_to("/"), root / config.relative_to("/"), systemctl)
    except (ConfigurationError, OSError, RuntimeError) as error:  # the last: this user has no home folder
        print(f"vecd install-service: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_COULD_NOT_START
    return EXIT_OK


def own_program() -> list[str]:
    """The command line of `vecd`, which depends on no search path."""
    if getattr(sys, "frozen", False):
        return [sys.executable]
    script = Path(sys.executable).parent / "vecd"
    return [str(script)] if os.access(script, os.X_OK) else command_of("vecd")


def _unit(name: str, program: Sequence[str], config: Path, options: InstallOptions) -> str:
    """Raises ConfigurationError for what its user could not run, or what cannot stand in it."""
    text = Path(__file__).with_name("data").joinpath(name).read_text(encoding="utf-8")
    if name == SOCKET:
        return text
    text = text.replace("/opt/vecd/.venv/bin/vecd", " ".join(map(_quoted, program)))
    text = text.replace("/etc/vecd.toml", _quoted(str(config)))
    needed = [Path(program[0]), Path(sys.executable).resolve(), Path(__file__).resolve()]
    if options.user:
        common, privileged = text.split("# What follows only the system's service manager can do")
        text = common + privileged[privileged.index("[Install]") :].replace("multi-user.target", "default.target")
        return text.replace("Wants=network-online.target\nAfter=network-online.target", "After=default.target")
    if any(re.match("/(home|root|run/user)/", str(path)) for path in needed):  # ProtectHome= hides: systemd.exec(5)
        text = text.replace("ProtectHome=yes", "ProtectHome=read-only")
    if options.run_as:
        return text.replace("DynamicUser=yes", f"User={_quoted(options.run_as)}")
    if closed := [part for path in needed for part in path.parents if not part.stat().st_mode & stat.S_IXOTH]:
        why = f"{closed[-1]} is closed to the service's user: put vecd elsewhere, as below /opt, or give --run-as USER"
        raise ConfigurationError(f"{program[0]}: {why}")
    return text


def _quoted(word: str) -> str:
    """A word of a command line. Source: systemd.service(5), COMMAND LINES. Raises ConfigurationError."""
    if not word.isprintable() or set(word) & set("$\"'\\"):
        raise ConfigurationError(f"{word!r}: has a quote, a backslash, a $ or a control character, as no unit can")
    return f'"{word}"'.replace("%", "%%") if set(word) & set(" ;") else word.replace("%", "%%")


def _change(texts: dict[str, str], folder: Path, config: Path, systemctl: Callable[..., None]) -> None:
    """Install the units, or remove them if `texts` is empty. Raises ConfigurationError for units of others, and
    OSError."""
    there = [path for name in (SOCKET, SERVICE) if os.path.lexists(path := folder / name)]
    if strange := [path for path in there if not (path.is_file() and path.read_bytes().startswith(_MADE_BY))]:
        raise ConfigurationError(*[f"{path}: is not of `vecd install-service`: remove it first" for path in strange])
    if not texts:
        if there:
            systemctl("disable", "--now", *(path.name for path in there))
        for path in there:
            path.unlink()
        systemctl("daemon-reload")
        return
    if folder / SOCKET in there and SOCKET not in texts:
        raise ConfigurationError(f"{folder / SOCKET}: is there, and listens: give --socket, or --remove it first")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.touch()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    systemctl("daemon-reload")
    systemctl("enable", *texts)
    # A socket that is there stays open: no client is refused.
    systemctl("restart", *([SERVICE] if folder / SOCKET in there else texts))
