"""Looks at --tls-cert and --tls-key before anything is started with them, or reloaded.

Owns the check; what is wrong with the files, `vecd.gateway.http.tls` finds. Called by `supervisor`.
"""

from pathlib import Path

from vecd.gateway.http.tls import find_problems
from vecd.launch.base.exit_codes import ConfigurationError


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raises ConfigurationError with a line for each problem; without both settings there is none."""
    if cert is None and key is None:
        return
    if cert is None or key is None:
        given, missing = ("--tls-key", "--tls-cert") if cert is None else ("--tls-cert", "--tls-key")
        raise ConfigurationError([f"{given}: given without {missing}; TLS needs both"])
    problems = find_problems(str(cert), str(key))
    if problems:
        raise ConfigurationError([f"--tls-cert, --tls-key: {problem}" for problem in problems])
