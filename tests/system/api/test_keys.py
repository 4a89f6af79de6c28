"""Keys, their scopes and limits, the shares of tenants and the admin listener, of real servers."""

import asyncio
import base64
import itertools
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.serving import Server, clean_environment, eventually, exact_server, running_server, vecd
from tests.support.texts import make_texts

WEIGHTLESS = ("--engine", "weightless", "--workers", "1")


def secret(name: str) -> str:
    return f"the-secret-of-{name}-0123456789"


def write_keys(path: Path, **keys: str) -> str:
    """A file of keys: name → the lines of its entry."""
    entries = [
        f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(secret(name).encode()).hexdigest()}"\n{lines}\n'
        for name, lines in keys.items()
    ]
    path.write_text("\n".join(entries))
    return str(path)


def headers(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret(name)}"}


def error_of(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def assert_no_key_was_written(server: Server, *names: str) -> None:
    for name in names:
        assert secret(name) not in server.stderr
        assert sha256(secret(name).encode()).hexdigest() not in server.stderr


# --- scopes, limits, the admin listener: without a model --------------------------------------------------------------

KEYS = {
    "alice": 'scopes = ["embed"]',
    "watcher": 'scopes = ["metrics"]',
    "root": "",
    "slow": "tokens_per_s = 20",
}
POST = {"/v1/embeddings", "/embeddings", "/admin/reload"}
SCOPES = {
    "/v1/embeddings": "embed",
    "/embeddings": "embed",
    "/v1/models": "embed",
    "/models": "embed",
    "/v1/models/all-MiniLM-L6-v2": "embed",
    "/metrics": "metrics",
    "/admin/keys": "admin",
}
OF_KEYS = {"alice": {"embed"}, "watcher": {"metrics"}, "root": {"embed", "metrics", "admin"}}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Two gateways behind one file of keys."""
    path = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", **KEYS)
    with running_server(*WEIGHTLESS, "--gateways", "2", "--keys-file", path) as server:
        yield server
        assert_no_key_was_written(server, *KEYS)


def ask(server: Server | httpx.Client, path: str, key: dict[str, str]) -> httpx.Response:
    client, url = (server, path) if isinstance(server, httpx.Client) else (httpx, server.url + path)
    if path in POST:
        return client.post(url, json={"input": "text"}, headers=key)
    return client.get(url, headers=key)


@pytest.mark.parametrize("path", [*SCOPES, "/info", "/openapi.json", "/admin/reload"])
def test_a_wrong_key_opens_no_path(guarded, path):
    for wrong in ({}, {"authorization": "Bearer " + "x" * 40}, {"api-key": secret("nobody")}):
        assert error_of(ask(guarded, path, wrong), 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", SCOPES)
@pytest.mark.parametrize("name", OF_KEYS)
def test_a_key_opens_what_its_scopes_say(guarded, name, path):
    answer = ask(guarded, path, headers(name))
    if SCOPES[path] in OF_KEYS[name]:
        assert answer.status_code == 200
    else:
        error = error_of(answer, 403)
        assert error["code"] == "insufficient_scope"
        assert f"'{SCOPES[path]}'" in error["message"]


@pytest.mark.parametrize(("name", "status"), [("", 401), ("nobody", 401), ("watcher", 403)])
def test_the_head_is_enough_to_be_refused(guarded, name, status):
    """Before a body has been sent."""
    key = f"api-key: {secret(name)}\r\n" if name else ""
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n{key}\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as sock:
        sock.sendall(head.encode())
        assert sock.makefile("rb").readline().split()[1] == str(status).encode()


def test_the_probes_need_no_key_and_neither_do_pages_that_say_nothing_of_the_server(guarded):
    for path in ("/health", "/ping", "/live", "/", "/docs"):
        answer = ask(guarded, path, {"api-key": "wrong"})
        assert answer.status_code == 200
        assert "MiniLM" not in answer.text


@pytest.mark.parametrize("name", OF_KEYS)
def test_every_key_opens_the_reference_and_its_part_of_info(guarded, name):
    assert "/v1/embeddings" in ask(guarded, "/openapi.json", headers(name)).json()["paths"]
    info = ask(guarded, "/info", headers(name)).json()
    assert info["max_input_length"] == 256
    assert ("workers" in info) == ("metrics" in OF_KEYS[name])
    assert ("tenants" in info) == (name == "root")


def clients_of_both_gateways(server: Server, stack: ExitStack) -> list[httpx.Client]:
    clients: dict[int, httpx.Client] = {}
    for _ in range(1000):
        # Kept however long the test takes: another connection might be another gateway's.
        kept = httpx.Limits(keepalive_expiry=None)
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=30, limits=kept))
        clients.setdefault(client.get("/admin/keys", headers=headers("root")).json()["gateway"], client)
        if len(clients) == 2:
            return list(clients.values())
    raise AssertionError("one gateway accepts nothing")


def test_tokens_per_second_are_kept_at_each_gateway_by_the_key(guarded):
    with ExitStack() as stack:
        for client in clients_of_both_gateways(guarded, stack):
            first = client.post("/v1/embeddings", json={"input": ["text"] * 2000}, headers=headers("slow"))
            assert first.status_code == 200
            refused = client.post("/v1/embeddings", json={"input": "text"}, headers=headers("slow"))
            error = error_of(refused, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert "20 tokens a second" in error["message"]
            assert 59 <= int(refused.headers["retry-after"]) <= 60
            assert client.post("/v1/embeddings", json={"input": "text"}, headers=headers("alice")).status_code == 200
            [use] = [
                key["use"]
                for key in client.get("/admin/keys", headers=headers("root")).json()["keys"]
                if key["name"] == "slow"
            ]
            assert use == {"requests": 1, "running": 0, "tokens": first.json()["usage"]["total_tokens"], "refused": 1}


def test_keys_are_told_without_anything_to_know_them_by(guarded):
    answer = ask(guarded, "/admin/keys", headers("root"))
    keys = {key["name"]: key for key in answer.json()["keys"]}
    assert keys.keys() == KEYS.keys()
    assert keys["watcher"]["scopes"] == ["metrics"]
    assert (keys["slow"]["tokens_per_s"], keys["alice"]["tokens_per_s"]) == (20, None)
    for name in KEYS:
        assert secret(name) not in answer.text
        assert sha256(secret(name).encode()).hexdigest()[:16] not in answer.text


def test_names_of_keys_are_told_to_operators_alone(guarded):
    assert "tenants" not in ask(guarded, "/info", headers("watcher")).json()
    tenants = ask(guarded, "/info", headers("root")).json()["tenants"]
    assert [key["name"] for key in tenants["keys"]] == list(KEYS)
    for name in KEYS:
        assert name not in ask(guarded, "/metrics", headers("watcher")).text


def test_an_open_server_has_no_admin_paths():
    with running_server(*WEIGHTLESS) as server:
        for path in ("/admin/keys", "/admin/reload"):
            assert error_of(ask(server, path, {}), 404)["code"] == "unknown_url"
        assert ask(server, "/metrics", {}).status_code == 200
        assert "tenants" not in server.info()


@pytest.mark.parametrize("with_admin_key", [False, True])
def test_the_admin_listener_has_what_is_not_for_the_public(tmp_path, with_admin_key):
    flags, key = [*WEIGHTLESS, "--admin-uds", str(tmp_path / "admin.sock")], {}
    if with_admin_key:
        keys = {"alice": 'scopes = ["embed"]', "root": 'scopes = ["admin", "metrics"]'}
        flags, key = [*flags, "--keys-file", write_keys(tmp_path / "keys.toml", **keys)], headers("root")
    with running_server(*flags) as server:
        transport = httpx.HTTPTransport(uds=str(tmp_path / "admin.sock"))
        with httpx.Client(transport=transport, base_url="http://admin", timeout=30) as admin:
            for path in ("/info", "/metrics", "/admin/keys", "/admin/reload"):
                if path != "/info":  # there, of which the public sees less; see test_tei
                    assert error_of(ask(server, path, key), 404)["code"] == "unknown_url"
                assert ask(admin, path, {}).status_code == (401 if with_admin_key else 202 if "reload" in path else 200)
                assert ask(admin, path, key).status_code == (202 if "reload" in path else 200)
            for path in ("/v1/embeddings", "/v1/models"):
                assert error_of(ask(admin, path, key), 404)["code"] == "unknown_url"
            for path in ("/health", "/live"):
                assert ask(admin, path, {}).status_code == ask(server, path, {}).status_code == 200
            expected = ["alice", "root"] if with_admin_key else []
            tenants = ask(admin, "/info", key).json()["tenants"]
            assert [each["name"] for each in tenants["keys"]] == expected


def test_a_changed_file_of_keys_is_read_again(tmp_path):
    path = tmp_path / "keys.toml"
    write_keys(path, old="", stays="")
    with running_server(*WEIGHTLESS, "--keys-file", str(path)) as server, httpx.Client(base_url=server.url) as client:

        def status(name):
            return client.post("/v1/embeddings", json={"input": "text"}, headers=headers(name)).status_code

        assert (status("old"), status("new"), status("stays")) == (200, 401, 200)
        new = tmp_path / "new.toml"
        write_keys(new, new="", stays="")
        os.replace(new, path)
        eventually(lambda: status("new") == 200)
        assert (status("old"), status("stays")) == (401, 200)
        path.write_text("[[keys]]\nname = 'broken'\n")
        eventually(lambda: "entry 1: key, sha256: one of the two is needed" in server.stderr)
        assert (status("old"), status("new"), status("stays")) == (401, 200, 200)
        assert_no_key_was_written(server, "old", "new", "stays")


def test_what_is_wrong_with_keys_is_told_at_once_and_no_key_is(tmp_path):
    (tmp_path / "tmp").mkdir()
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "a"\nkey = "{secret("a")}"\nlimit = 1\n[[keys]]\nname = "b"\nkey = "s3cret"\n')
    path.chmod(0o644)
    done = subprocess.run(
        vecd("--port", "0", *WEIGHTLESS, "--keys-file", str(path), "--api-keys", f"x={secret('x')},{secret('y')}"),
        env=clean_environment(tmp_path, {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    for line in (
        "--api-keys: entry 2: must be NAME=KEY",
        "holds keys, and others than its owner have access to it (mode 644)",
        "entry 1: limit: there is no such field",
        "entry 2: key: has 6 characters, at least 16 are needed",
    ):
        assert line in done.stderr
    for name in ("a", "x", "y"):
        assert secret(name) not in done.stderr
    assert "s3cret" not in done.stderr


def test_a_file_without_keys_opens_no_server(tmp_path):
    (tmp_path / "tmp").mkdir()
    path = tmp_path / "keys.toml"
    path.write_text("")
    done = subprocess.run(
        vecd("--port", "0", *WEIGHTLESS, "--keys-file", str(path)),
        env=clean_environment(tmp_path, {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "has no keys" in done.stderr


# --- shares of tenants: with a model ----------------------------------------------------------------------------------

NUM_GREEDY = 100
LONG = "words of which there are so many that the tenant who sends them wants all that there is of the server " * 4
_numbers = itertools.count()


def long_texts(num: int) -> list[str]:
    """No two of all that are made are the same, so that each is computed."""
    return [f"{next(_numbers)} {LONG}" for _ in range(num)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A server whose queue is full for a tenant after five seconds' worth of work."""
    keys = {"greedy": "", "polite": "", "one-by-one": "max_requests = 1", "lowly": 'max_priority = "bulk"'}
    path = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", **keys)
    with exact_server("--workers", "1", "--max-wait", "5", "--keys-file", path) as server:
        yield server
        assert_no_key_was_written(server, *keys)


def post(server: Server, texts: list[str] | str, name: str, **more: str) -> httpx.Response:
    body = {"input": texts, "encoding_format": "base64"}
    return httpx.post(f"{server.url}/v1/embeddings", json=body, headers={**headers(name), **more}, timeout=60)


def queue(server: Server) -> dict[str, int]:
    return httpx.get(f"{server.url}/info", headers=headers("polite")).json()["queue"]


async def flood(server: Server, polite: asyncio.Event, statuses: list[int], wrong: list[str], expected) -> None:
    """A hundred connections that send one large request after the other, but for ten with one text each."""
    texts, vectors = expected

    async def send(client: httpx.AsyncClient, n: int) -> None:
        is_bulk = n % 10 != 0
        body = {"input": long_texts(16) if is_bulk else texts[n % len(texts)]}
        while not polite.is_set():
            answer = await client.post(f"{server.url}/v1/embeddings", json=body, headers=headers("greedy"))
            statuses.append(answer.status_code)
            if answer.status_code == 429:
                await asyncio.sleep(0.5)  # the test's own process must not be what is busy
            if not is_bulk and answer.status_code == 200:
                vector = np.array(answer.json()["data"][0]["embedding"], dtype=np.float32)
                if np.abs(vector - vectors[n % len(texts)]).max() > 1e-5:
                    wrong.append(f"greedy {n}")

    limits = httpx.Limits(max_connections=NUM_GREEDY)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(client, n)) for n in range(NUM_GREEDY)]
        await polite.wait()
        for task in tasks:
            task.cancel()


def test_a_greedy_tenant_does_not_disturb_a_polite_one(shared):
    """As in tests/unit/gateway/scheduling/test_scheduler.py, where turns are counted: here that none is refused and
    that each answer is what it is in peace, while the greedy one is told that its queue is full."""
    texts = [text for text in make_texts(40) if text.strip()][:6]
    in_peace = post(shared, texts, "polite").json()["data"]
    expected = (texts, [np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in in_peace])

    async def test():
        done = asyncio.Event()
        statuses: list[int] = []
        wrong: list[str] = []
        refused: list[str] = []
        flooding = asyncio.create_task(flood(shared, done, statuses, wrong, expected))
        try:
            async with asyncio.timeout(120), httpx.AsyncClient(timeout=60) as client:
                while not {200, 429} <= set(statuses):
                    await asyncio.sleep(0.05)
                for text, vector in zip(*expected, strict=True):
                    answer = await client.post(
                        f"{shared.url}/v1/embeddings", json={"input": text}, headers=headers("polite")
                    )
                    if answer.status_code != 200:
                        refused.append(answer.text)
                    elif np.abs(np.array(answer.json()["data"][0]["embedding"]) - vector).max() > 1e-5:
                        wrong.append("polite")
        finally:
            done.set()
            await flooding
        assert refused == []
        assert wrong == []
        assert set(statuses) <= {200, 429}

    asyncio.run(test())
    eventually(lambda: queue(shared)["requests"] == 0)


def test_requests_of_a_key_at_a_time(shared):
    with ThreadPoolExecutor() as threads:
        first = threads.submit(post, shared, long_texts(100), "one-by-one")
        eventually(lambda: queue(shared)["sequences"] > 50)
        refused = post(shared, "text", "one-by-one")
        assert not first.done()
        error = error_of(refused, 429)
        assert error["code"] == "rate_limit_exceeded"
        assert error["message"].endswith("this key already has 1 request in progress; its limit is 1")
        assert refused.headers["retry-after"] in {"1", "2", "3"}
        assert post(shared, "text", "polite").status_code == 200
        assert first.result().status_code == 200
    assert post(shared, "text", "one-by-one").status_code == 200


def test_a_keys_highest_priority_bounds_what_it_asks_for(shared):
    """Bulk waits for normal, whatever is asked for."""
    with ThreadPoolExecutor() as threads:
        low = threads.submit(post, shared, long_texts(100), "lowly", **{"x-vecd-priority": "interactive"})
        eventually(lambda: queue(shared)["sequences"] > 50)
        assert post(shared, long_texts(20), "polite").status_code == 200
        assert not low.done()
        assert low.result().status_code == 200
