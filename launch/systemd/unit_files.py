"""The text of vecd's systemd units: the files of deploy/, changed for another program, user or address.

Owns what is changed, and how paths are written in units. Every directive and its reason stands in the files, which are
links in `data`. Writes no file. Called by `vecd.launch.systemd.install_service`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

SERVICE, SOCKET = "vecd.service", "vecd.socket"
MADE_BY = "# Made by `vecd install-service`"
"""The beginning of a unit that may be replaced and removed without --force."""

DEFAULT_LISTEN = "127.0.0.1:8000"
_PROGRAM, _CONFIG = "/opt/vecd/.venv/bin/vecd", "/etc/vecd.toml"
_PRIVILEGED = "# What follows only the system's service manager can do"
_SOCKET_MODE = """\
# Only programs of root and of this user may connect: SocketUser= names another.
SocketMode=0600
"""
_MAX_PATH_BYTES = 107
# Source: unix(7), sun_path, with a zero at its end.


def service_unit(
    command: Sequence[str],
    config: str,
    *,
    is_of_user: bool = False,
    run_as: str | None = None,
    is_in_home: bool = False,
) -> str:
    """The service. `command`: what `vecd` is on the command line. `config`: path of the settings. `run_as`: a user that
    exists; None: one that systemd makes up. `is_in_home`: the service reads files below /home or /root.

    Raises ValueError for a path that systemd cannot start.
    """
    if any(character in "$\"'\\" for character in command[0]):
        raise ValueError(f"{command[0]}: systemd starts no program with a quote, a backslash or a $ in its path")
    text = _read(SERVICE)
    program = " ".join([quoted(command[0], is_program=True), *map(quoted, command[1:])])
    changes = {f"={_PROGRAM} ": f"={program} ", f"--config {_CONFIG}": f"--config {quoted(config)}"}
    if is_of_user:
        common, privileged = text.split(_PRIVILEGED)
        text = common + privileged[privileged.index("[Install]") :]
        changes["Wants=network-online.target\nAfter=network-online.target"] = "After=default.target"
        changes["WantedBy=multi-user.target"] = "WantedBy=default.target"
    else:
        if run_as is not None:
            changes["DynamicUser=yes"] = f"User={run_as}"
        if is_in_home:
            changes["ProtectHome=yes"] = "ProtectHome=read-only"
    return _changed(text, changes)


def socket_unit(listen: str = DEFAULT_LISTEN) -> str:
    """The socket. `listen`: HOST:PORT, or the absolute path of a unix socket.

    Raises ValueError for a path that cannot stand in a unit.
    """
    if not listen.isprintable() or listen != listen.strip() or listen.endswith("\\"):
        raise ValueError(f"--uds: {listen!r} cannot stand in a unit")
    changes = {DEFAULT_LISTEN: listen.replace("%", "%%")}
    if listen.startswith("/"):
        if len(listen.encode()) > _MAX_PATH_BYTES:
            raise ValueError(f"--uds: a unix socket's path has at most {_MAX_PATH_BYTES} bytes (given: {listen})")
        changes["\n[Install]"] = f"{_SOCKET_MODE}\n[Install]"
    return _changed(_read(SOCKET), changes)


def quoted(argument: str, *, is_program: bool = False) -> str:
    """One argument of a command line in a unit. Source: systemd.service(5), COMMAND LINES. Raises ValueError."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if not is_program:
        escaped = escaped.replace("$", "$$")
    if any(not character.isprintable() for character in argument):
        raise ValueError(f"{argument!r}: has characters that cannot stand in a unit")
    is_plain = argument and not any(character in " '\"\\;" for character in argument)
    return escaped if is_plain else f'"{escaped}"'


def _read(name: str) -> str:
    return Path(__file__).with_name("data").joinpath(name).read_text(encoding="utf-8")


def _changed(text: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, f"the unit no longer has {old!r}"
        text = text.replace(old, new)
    return text
