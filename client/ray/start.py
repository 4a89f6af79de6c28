"""`python -m vecd.client.ray.start --head …`: `ray start` in the environment of `vecd.client.ray.start`.

Variables that are set already win, so that each can be changed. `--print` writes the variables instead, as
lines of `export` for `eval` in a shell. Never returns: the process becomes `ray`. Called from the command line.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

from vecd.base.programs import not_installed

# The environment in which Ray Serve balances vecd without losing requests: HAProxy mode, and how HAProxy repeats.

MAX_REPEATED_BYTES = 1 << 18
"""HAProxy repeats a request whose head and body fit its buffer. Memory: twice this for each request under way."""

_PER_USER_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}


def environment(haproxy_folder: str | Path | None = None) -> dict[str, str]:
    """The variables that every node's `ray start` needs, and the program that deploys.

    `haproxy_folder`: of HAProxy's files, instead of /tmp/haproxy-serve, which all clusters on a machine would share.
    The paths of unix sockets lie in it, so it must be short.
    """
    variables = {
        # Requests go from HAProxy straight to the replicas. Serve's own proxy costs 13 to 19 ms of processor time each.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # What was in flight on a node that dies is sent to another one: embedding twice does no harm. Ray's default
        # repeats connect failures alone. 503 is what vecd answers while it starts or drains. Never 500 (an input may be
        # the cause) and never 429 (the share of a caller is used up everywhere).
        # What the lines behind it set is in no variable of Ray's, which writes this one into the file as it stands.
        # Without them a request is repeated only if all of it came in one packet: HAProxy keeps no copy of one that is
        # still coming.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response 503\n"
        "    option http-buffer-request\n    timeout http-request 60s",
        "RAY_SERVE_HAPROXY_RETRIES": "3",
        # A larger body is not repeated. Ray's default is 16 KiB: a few pages of text.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(MAX_REPEATED_BYTES),
        # A node that hangs is found after 2 s and not after 10.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "1",
        # A replica whose vecd does not answer is stopped at once: what waits there is then repeated elsewhere.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # An update holds each wave of replicas for as long. Ray's 30 s made 72 s at half the rate of an update.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
        # The parser of HAProxy's log takes 90 to 140 µs a request; vecd has metrics of its own.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # The replica waits and computes nothing: no second event loop, and no queue between the two.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # How soon the autoscaler sees a queue; Ray's default is 10 s.
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    }
    if haproxy_folder is not None:
        variables |= {name: str(Path(haproxy_folder, file)) for name, file in _PER_USER_FILES.items()}
    return variables


def missing() -> list[str]:
    """The names of `environment()` that this process's environment does not have."""
    return [name for name in environment() if name not in os.environ]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code, if Ray is not started."""
    arguments = sys.argv[1:] if argv is None else argv
    variables = environment()
    if arguments == ["--print"]:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))
        return 0
    # Beside this Python first: an environment's programs are not always on the PATH.
    ray = shutil.which("ray", path=str(Path(sys.executable).parent)) or shutil.which("ray")
    if ray is None:
        print(f"vecd.client.ray.start: ray is {not_installed('vecd[ray]')}", file=sys.stderr)
        return 2
    return os.execve(ray, [ray, "start", *arguments], {**variables, **os.environ})


if __name__ == "__main__":
    sys.exit(main())
