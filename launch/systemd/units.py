"""The text of vecd's systemd units: the service and its socket, for the system and for one user.

Owns every directive and the reason for it, and how paths are written in units. `deploy/vecd.service` and
`deploy/vecd.socket` are what these functions make for /opt/vecd/.venv/bin/vecd, and a test compares them. Writes no
file. Called by `vecd.launch.systemd.install_service`.
"""

from collections.abc import Sequence

MADE_BY = "# Made by `vecd install-service`, which replaces it: make changes in drop-ins (systemctl edit vecd)."
"""The first line of what may be replaced and removed without asking."""

DEFAULT_LISTEN = "127.0.0.1:8000"
_MAX_PATH_BYTES = 107
# Source: unix(7), sun_path, with a zero at its end.

_SERVICE = """\
{made_by}
[Unit]
Description=vecd, the vector daemon
{ordering}
# A start that fails is tried again every second, and given up after 10 tries within a minute.
StartLimitIntervalSec=60
StartLimitBurst=10

[Service]
Type=notify
NotifyAccess=main
ExecStart={command} serve --config {config}
# Reads {config_shown} again, and replaces the workers one generation by another, without a failed request. Waits
# for what comes of it: `systemctl reload` fails when the new configuration cannot be used, and the old one serves on.
ExecReload={command} reload $MAINPID
Restart=on-failure
RestartSec=1
# A bad configuration does not get better by trying again.
RestartPreventExitStatus=2
# While the model loads vecd asks for more time, every 5 s; so this is for a start that hangs.
TimeoutStartSec=90
# SIGTERM goes to the supervisor alone, which drains; what is left at the end is killed. vecd asks for as much time as
# --drain-timeout says; so this is for a supervisor that hangs.
KillMode=mixed
TimeoutStopSec=45
# The supervisor says that it is alive every 5 s, unless only a new server helps: docs/systemd.md.
WatchdogSec=30
# A worker that the kernel kills for memory is replaced by the supervisor.
OOMPolicy=continue
{account}RuntimeDirectory=vecd
RuntimeDirectoryMode=0700
CacheDirectory=vecd
CacheDirectoryMode=0700
UMask=0077
LimitCORE=0
LimitNOFILE=65536
{hardening}
[Install]
WantedBy={wanted_by}
"""

_HARDENING = """\
# Models that are fetched from the hub.
Environment=HF_HOME=%C/vecd/hub

# Not MemoryDenyWriteExecute: oneDNN, which computes torch's products, compiles its kernels into memory.
# Not ProcSubset=pid: without /proc/cpuinfo torch takes the processor for one without vector instructions.
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome={protect_home}
PrivateTmp=yes
# A GPU needs its devices: deploy/vecd-gpu.conf.
PrivateDevices=yes
DevicePolicy=closed
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
LockPersonality=yes
RemoveIPC=yes
KeyringMode=private
SystemCallArchitectures=native
# Not without @resources, which ZeroMQ's threads use.
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
"""

# What a user's own systemd may do without privileges.
_USER_HARDENING = """\
NoNewPrivileges=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
"""

_SOCKET = """\
{made_by}
[Unit]
Description=the socket of vecd, the vector daemon

[Socket]
ListenStream={listen}
FileDescriptorName=vecd
Backlog=4096
# What has connected while vecd was away is for its next life.
FlushPending=no
{mode}
[Install]
WantedBy=sockets.target
# The service is not started without, and would otherwise listen by itself.
RequiredBy=vecd.service
"""


def service_unit(
    command: Sequence[str],
    config: str,
    *,
    is_of_user: bool = False,
    run_as: str | None = None,
    is_in_home: bool = False,
) -> str:
    """The service. `command`: what `vecd` is on the command line. `config`: path of the settings. `run_as`: a user that
    exists; None: one that systemd makes up. `is_in_home`: files below /home or /root are needed.

    Raises ValueError for what systemd cannot start.
    """
    if any(character in "$\"'\\" for character in command[0]):
        raise ValueError(f"{command[0]}: systemd starts no program with a quote, a backslash or a $ in its path")
    hardening = _HARDENING.format(protect_home="read-only" if is_in_home else "yes")
    if is_of_user:
        account, hardening = "", _USER_HARDENING
    elif run_as is None:
        account = "DynamicUser=yes\n"
    else:
        account = f"User={run_as}\n"
    return _SERVICE.format(
        made_by=MADE_BY,
        ordering="After=default.target" if is_of_user else "Wants=network-online.target\nAfter=network-online.target",
        command=" ".join([quoted(command[0], is_program=True), *map(quoted, command[1:])]),
        config=quoted(config),
        config_shown=config,
        account=account,
        hardening=hardening,
        wanted_by="default.target" if is_of_user else "multi-user.target",
    )


def socket_unit(listen: str = DEFAULT_LISTEN) -> str:
    """The socket. `listen`: HOST:PORT, or the absolute path of a unix socket.

    Raises ValueError for a path that systemd would not read as it is.
    """
    is_path = listen.startswith("/")
    if not listen.isprintable() or listen != listen.strip() or listen.endswith("\\"):
        raise ValueError(f"--uds: {listen!r} cannot stand in a unit")
    if is_path and len(listen.encode()) > _MAX_PATH_BYTES:
        raise ValueError(f"--uds: a unix socket's path has at most {_MAX_PATH_BYTES} bytes (given: {listen})")
    return _SOCKET.format(
        made_by=MADE_BY,
        listen=listen.replace("%", "%%"),
        mode="# Programs of root and of this user alone may connect: SocketUser= names another.\nSocketMode=0600\n"
        if is_path
        else "",
    )


def quoted(argument: str, *, is_program: bool = False) -> str:
    """One argument of a command line in a unit. Source: systemd.service(5), COMMAND LINES."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if not is_program:
        escaped = escaped.replace("$", "$$")
    if any(not character.isprintable() for character in argument):
        raise ValueError(f"{argument!r}: has characters that cannot stand in a unit")
    is_plain = argument and not any(character in " '\"\\;" for character in argument)
    return escaped if is_plain else f'"{escaped}"'
