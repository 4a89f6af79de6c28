"""`vecd install-service`: writes systemd units that keep a server of this installation running.

Owns the command: its flags, what it replaces and refuses to replace, and the commands of systemctl that belong to it.
The content of the files is `vecd.launch.systemd.placement`'s and `vecd.launch.systemd.unit_files`'. Called by
`vecd.launch.cli`.
"""

import argparse
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vecd.client.suggestions import flags_of
from vecd.launch.base.exit_codes import EXIT_BAD_CONFIGURATION, EXIT_COULD_NOT_START, EXIT_OK, ConfigurationError
from vecd.launch.config.models import load_models
from vecd.launch.config.settings import load_flags
from vecd.launch.systemd.placement import InstallPaths, contents, own_command, paths_of
from vecd.launch.systemd.unit_files import MADE_BY, SERVICE, SOCKET

_SYSTEMCTL_TIMEOUT_S = 600.0
_UNIT_MODE = 0o644
_USER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""What can stand in a unit."""
_DESCRIPTION = """\
Have systemd keep a server running: writes vecd.service, which runs this very installation, and its settings. MODEL and
every flag of `vecd serve` are taken, and written into the settings; without any, settings that are there stay. Then it
says what to do next, or does it (--now). What is there and differs is not touched without --force."""


def main(arguments: Sequence[str]) -> int:
    """The command. Returns the exit code: 2 for what cannot be done as given, 3 when writing or systemctl failed."""
    parser = _parser()
    options, flags = parser.parse_known_args(arguments)
    try:
        return _remove(options, flags) if options.remove else _install(options, flags, flags_of(parser))
    except ConfigurationError as error:
        for problem in error.problems:
            print(f"vecd install-service: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except (OSError, UnicodeError, subprocess.SubprocessError) as error:
        print(f"vecd install-service: {error}", file=sys.stderr)
        return EXIT_COULD_NOT_START


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vecd install-service",
        description=_DESCRIPTION,
        usage="vecd install-service [MODEL ...] [--flags of vecd serve] [--socket] [--user | --run-as USER] [--now] …",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--socket", action="store_true", help="also vecd.socket: systemd listens, and keeps what connects while vecd "
        "restarts; --host, --port and --uds say where")  # fmt: skip
    add("--user", action="store_true", help="for this user's own systemd, without root")
    add("--run-as", metavar="USER", help="run as this user; default: one that systemd makes up")
    add("--print", action="store_true", help="print the files, and write nothing")
    add("--now", action="store_true", help="enable and start it, too")
    add("--force", action="store_true", help="replace, or remove, what is there and differs")
    add("--remove", action="store_true", help="stop and remove the units; the settings stay")
    add("--root", type=Path, metavar="DIR", help="write below DIR, as into an image; no systemctl")
    return parser


def _install(options: argparse.Namespace, flags: Sequence[str], own_flags: Sequence[str]) -> int:
    paths = _paths(options)
    settings = load_flags(flags, own_flags)
    load_models(settings)
    texts = contents(paths, settings, has_socket=options.socket, run_as=options.run_as, command=own_command())
    if options.print:
        print("\n".join(f"# {path}\n{text}" for path, text in texts.items()), end="")
        return EXIT_OK
    files = {paths.on_disk(path): text for path, text in texts.items()}
    config, socket = paths.on_disk(paths.config), paths.on_disk(paths.units / SOCKET)
    if not settings.model_fields_set and config.exists():
        del files[config]
    if not options.socket and os.path.lexists(socket):
        problem = "is there, and listens for the service: give --socket, too, or --remove it first"
        raise ConfigurationError([f"{socket}: {problem}"])
    written = _write(files, force=options.force)
    units = [*([SOCKET] if options.socket else []), SERVICE]
    # The service uses new files only after a restart. A socket that is as before stays open: no client is refused.
    restarted = units if socket in written else [SERVICE]
    commands = [["daemon-reload"], ["enable", *units], ["restart", *restarted]]
    if options.now:
        return _systemctl(options, commands)
    print("Next:")
    for command in commands:
        print("  " + " ".join(_systemctl_command(options, command)))
    return EXIT_OK


def _remove(options: argparse.Namespace, flags: Sequence[str]) -> int:
    if flags:
        raise ConfigurationError(["--remove: takes no MODEL and no flags of `vecd serve`"])
    paths = _paths(options)
    units = _found(paths.on_disk(paths.units / name) for name in (SOCKET, SERVICE))
    strange = [path for path, text in units.items() if not text.startswith(MADE_BY)]
    if strange and not options.force:
        raise ConfigurationError([f"{path}: is not of `vecd install-service` (--force removes it)" for path in strange])
    if options.print:
        print("\n".join(map(str, units)))
        return EXIT_OK
    if not units:
        print("there is nothing to remove")
        return EXIT_OK
    if status := _systemctl(options, [["disable", "--now", *(path.name for path in units)]]):
        return status
    for path in units:
        path.unlink()
        print(f"removed {path}")
    print(f"{paths.on_disk(paths.config)} stays")
    return _systemctl(options, [["daemon-reload"]])


def _paths(options: argparse.Namespace) -> InstallPaths:
    """Raises ConfigurationError for options that do not go together, or that name nothing."""
    root, run_as = options.root, options.run_as
    paths = paths_of(is_of_user=options.user, root=root)
    may_write = os.geteuid() == 0 or options.user or options.print or root
    faults = (
        (root and not root.is_dir(), f"--root: {root} is no folder"),
        (root and options.now, "--now: not with --root, below which no systemd runs"),
        (run_as and options.user, "--run-as: not with --user, whose services are all this user's"),
        (run_as is not None and not _USER_NAME.fullmatch(run_as), f"--run-as: is no user's name (given: {run_as!r})"),
        (run_as and not root and not options.remove and not _is_user(run_as), f"--run-as: there is no user {run_as}"),
        (
            not may_write,
            f"only root may write {paths.units}: use sudo; or --user, for a service of your own; or --print",
        ),
    )
    if problems := [problem for is_wrong, problem in faults if is_wrong]:
        raise ConfigurationError(problems)
    return paths


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _write(files: Mapping[Path, str], *, force: bool) -> list[Path]:
    """Write all files, or none if one of them would be replaced without `force`. Returns those that are new or changed.

    Raises ConfigurationError for those that exist and differ, and OSError.
    """
    existing = _found(files)
    changed = [path for path, text in files.items() if existing.get(path) != text]
    differing = [path for path in changed if path in existing]
    if differing and not force:
        raise ConfigurationError([f"{path}: is there, and differs (--force replaces it)" for path in differing])
    for path, text in files.items():
        if path not in changed:
            print(f"{path} is there already")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(text)
        new.chmod(_UNIT_MODE)
        new.replace(path)
        print(f"wrote {path}")
    return changed


def _found(paths: Iterable[Path]) -> dict[Path, str]:
    """The text of the files that exist; "" for a link that leads nowhere."""
    there = [path for path in paths if os.path.lexists(path)]
    return {path: path.read_text(errors="replace") if path.exists() else "" for path in there}


def _systemctl_command(options: argparse.Namespace, command: Sequence[str]) -> list[str]:
    return ["systemctl", *(["--user"] if options.user else []), *command]


def _systemctl(options: argparse.Namespace, commands: Sequence[Sequence[str]]) -> int:
    """Run them until one fails. Raises OSError where there is no systemctl."""
    if options.root is not None:
        return EXIT_OK
    for command in commands:
        line = _systemctl_command(options, command)
        if subprocess.run(line, check=False, timeout=_SYSTEMCTL_TIMEOUT_S).returncode:
            print(f"vecd install-service: failed: {' '.join(line)}", file=sys.stderr)
            return EXIT_COULD_NOT_START
    return EXIT_OK
