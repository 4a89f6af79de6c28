"""The `vecd` command: which subcommand runs.

Owns the list of subcommands and their help. Imports each one only when it is called, because some take a second to
import.
"""

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from vecd.base.failures import EXIT_BAD_CONFIGURATION, EXIT_INTERRUPTED, EXIT_OK, exit_at_interrupt

_USAGE = """\
usage: vecd serve [MODEL…] [--flags]   serve the embeddings of models (vecd serve --help)
       vecd bench [--flags]            measure a running server (vecd bench --help)
       vecd top [--flags]              watch a running server (vecd top --help)
       vecd embed FILE... -o OUT       files of texts to files of vectors, or --output-dir (vecd embed --help)
       vecd check [MODEL] [--flags]    what a model is, how it is served here, if it is right (vecd check --help)
       vecd check --fleet URL URL…     whether servers may be mixed behind one name
       vecd key NAME                   make an API key, and its entry for --keys-file
       vecd install-service [--flags]  have systemd keep a server running (vecd install-service --help)
       vecd reload [PID | --port N]    have a server read its configuration again, and wait for it
       vecd --version"""
_MODULES = {
    "serve": "vecd.supervisor",
    "bench": "vecd.client.bench.command",
    "embed": "vecd.client.embed.command",
    "top": "vecd.client.top.command",
    "check": "vecd.launch.check.command",
    "key": "vecd.launch.config.keys",
    "reload": "vecd.launch.systemd.reload_command",
    "install-service": "vecd.launch.systemd.install_service",
}
_RETIRED = {
    "models": "vecd check --all --quick lists what is configured, /info and vecd top what is served",
    "plan": "vecd bench --documents N says how long N documents take",
}


def main(argv: Sequence[str] | None = None, interrupt_handler: Any = signal.default_int_handler) -> int:
    """Returns the exit code: 130 when it is interrupted, unless the subcommand has another. Side effect:
    `interrupt_handler` handles SIGINT once the subcommand is imported; before, SIGINT ends the process."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    exit_at_interrupt()
    if command in ("--version", "version"):
        from vecd.launch.config.plan import version

        print(f"vecd {version()}")
        return EXIT_OK
    if command in ("--help", "-h", "help"):
        print(_USAGE)
        return EXIT_OK
    if command not in _MODULES:
        from vecd.base.flags import did_you_mean

        if command in _RETIRED:
            print(f"vecd: vecd {command} is no more: {_RETIRED[command]}", file=sys.stderr)
        else:
            hint = did_you_mean(command, _MODULES)
            print(f"vecd: unknown command {command!r}{hint}\n\n{_USAGE}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    if command == "serve" and not {"--help", "-h", "--help-all"} & set(arguments):
        from vecd.base.programs import end_ahead, start_ahead

        exit_at_interrupt(end_ahead)
        start_ahead("gateway")
    run = getattr(import_module(_MODULES[command]), "serve" if command == "serve" else "main")
    signal.signal(signal.SIGINT, interrupt_handler)
    try:
        code: int = run(arguments)
        return code
    except KeyboardInterrupt:  # outside of the subcommand's own handling
        return EXIT_INTERRUPTED
