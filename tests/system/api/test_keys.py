"""Keys, their scopes and limits, and the admin listener, of real servers without a model."""

import os
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from tests.support.serving import (
    RunningServer,
    Server,
    eventually,
    running_server,
)
from tests.support.shared_servers import DUMMY, shared_server


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


KEYS = {
    "alice": 'scopes = ["embed"]',
    "watcher": 'scopes = ["metrics"]',
    "root": "",
    "slow": "tokens_per_s = 20",
    "leaver": "",
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
    """Two gateways behind one file of keys, and that file."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    with running_server(*DUMMY, "--gateways", "2", "--keys-file", write_keys(path, **KEYS)) as server:
        yield server, path
        for name in KEYS:
            assert secret(name) not in server.stderr
            assert sha256(secret(name).encode()).hexdigest() not in server.stderr


@pytest.fixture
def server(guarded):
    return guarded[0]


def ask(server: RunningServer | httpx.Client, path: str, key: dict[str, str]) -> httpx.Response:
    client, url = (server, path) if isinstance(server, httpx.Client) else (httpx, server.url + path)
    if path in POST:
        return client.post(url, json={"input": "text"}, headers=key)
    return client.get(url, headers=key)


@pytest.mark.parametrize("path", [*SCOPES, "/info", "/openapi.json", "/admin/reload"])
def test_a_wrong_key_opens_no_path(server, path):
    for wrong in ({}, {"authorization": "Bearer " + "x" * 40}, {"api-key": secret("nobody")}):
        assert error_of(ask(server, path, wrong), 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", SCOPES)
@pytest.mark.parametrize("name", OF_KEYS)
def test_a_key_opens_what_its_scopes_say(server, name, path):
    answer = ask(server, path, headers(name))
    if SCOPES[path] in OF_KEYS[name]:
        assert answer.status_code == 200
    else:
        error = error_of(answer, 403)
        assert error["code"] == "insufficient_scope"
        assert f"'{SCOPES[path]}'" in error["message"]


def test_the_probes_need_no_key_and_neither_do_pages_that_say_nothing_of_the_server(server):
    for path in ("/health", "/ping", "/live", "/", "/docs"):
        answer = ask(server, path, {"api-key": "wrong"})
        assert answer.status_code == 200
        assert "MiniLM" not in answer.text


@pytest.mark.parametrize("name", OF_KEYS)
def test_every_key_opens_the_reference_and_its_part_of_info(server, name):
    assert "/v1/embeddings" in ask(server, "/openapi.json", headers(name)).json()["paths"]
    info = ask(server, "/info", headers(name)).json()
    assert (info["model_id"], info["max_input_length"], info["auto_truncate"]) == ("all-MiniLM-L6-v2", 256, True)
    assert info.keys() >= TEI_KEYS
    assert info.keys() >= OURS if "metrics" in OF_KEYS[name] else info.keys() == TEI_KEYS
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


def test_tokens_per_second_are_kept_at_each_gateway_by_the_key(server):
    with ExitStack() as stack:
        for client in clients_of_both_gateways(server, stack):
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


def test_keys_are_told_without_anything_to_know_them_by(server):
    answer = ask(server, "/admin/keys", headers("root"))
    keys = {key["name"]: key for key in answer.json()["keys"]}
    assert keys.keys() == KEYS.keys()
    assert keys["watcher"]["scopes"] == ["metrics"]
    assert (keys["slow"]["tokens_per_s"], keys["alice"]["tokens_per_s"]) == (20, None)
    for name in KEYS:
        assert secret(name) not in answer.text
        assert sha256(secret(name).encode()).hexdigest()[:16] not in answer.text


def test_names_of_keys_are_told_to_operators_alone(server):
    assert "tenants" not in ask(server, "/info", headers("watcher")).json()
    tenants = ask(server, "/info", headers("root")).json()["tenants"]
    assert [key["name"] for key in tenants["keys"]] == list(KEYS)
    for name in KEYS:
        assert name not in ask(server, "/metrics", headers("watcher")).text


def test_an_open_server_has_no_admin_paths_and_says_all_of_itself():
    server = shared_server(*DUMMY)
    for path in ("/admin/keys", "/admin/reload"):
        assert error_of(ask(server, path, {}), 404)["code"] == "unknown_url"
    assert ask(server, "/metrics", {}).status_code == 200
    info = server.info()
    assert info.keys() >= TEI_KEYS | OURS
    assert "tenants" not in info


TEI_KEYS = {
    "model_id", "model_sha", "model_dtype", "served_model_name", "model_type", "max_concurrent_requests",
    "max_input_length", "max_batch_tokens", "max_batch_requests", "max_client_batch_size", "auto_truncate",
    "tokenization_workers", "version", "sha", "docker_label",
}  # fmt: skip
OURS = {"model", "limits", "queue", "workers", "gateways"}


def test_the_admin_listener_has_what_is_not_for_the_public(tmp_path):
    keys = {"alice": 'scopes = ["embed"]', "root": 'scopes = ["admin", "metrics"]'}
    flags = ("--admin-uds", str(tmp_path / "admin.sock"), "--keys-file", write_keys(tmp_path / "keys.toml", **keys))
    with running_server(*DUMMY, *flags) as server:
        key, transport = headers("root"), httpx.HTTPTransport(uds=str(tmp_path / "admin.sock"))
        with httpx.Client(transport=transport, base_url="http://admin", timeout=30) as admin:
            for path in ("/info", "/metrics", "/admin/keys", "/admin/reload"):
                assert ask(admin, path, {}).status_code == 401
                assert ask(admin, path, key).status_code == (202 if "reload" in path else 200)
            for path in ("/metrics", "/admin/keys", "/admin/reload"):
                assert error_of(ask(server, path, key), 404)["code"] == "unknown_url"
            for path in ("/v1/embeddings", "/v1/models"):
                assert error_of(ask(admin, path, key), 404)["code"] == "unknown_url"
            for path in ("/health", "/live"):
                assert ask(admin, path, {}).status_code == ask(server, path, {}).status_code == 200
            assert ask(server, "/info", key).json().keys() == TEI_KEYS, "the public sees what TEI's clients need"
            info = ask(admin, "/info", key).json()
            assert info.keys() >= TEI_KEYS | OURS
            assert [each["name"] for each in info["tenants"]["keys"]] == ["alice", "root"]
            assert admin.get("/").text == "vecd is running"


def test_a_changed_file_of_keys_is_read_again(guarded):
    """By each gateway; what cannot be read changes nothing."""
    server, path = guarded

    def has(*statuses):
        return all(
            tuple(ask(server, "/v1/models", headers(name)).status_code for name in ("leaver", "newcomer", "root"))
            == statuses
            for _ in range(8)  # each on a connection of its own
        )

    assert has(200, 401, 200)
    new = path.with_name("new.toml")
    write_keys(new, **{name: lines for name, lines in KEYS.items() if name != "leaver"}, newcomer="")
    os.replace(new, path)
    eventually(lambda: has(401, 200, 200))
    path.write_text("[[keys]]\nname = 'broken'\n")
    eventually(lambda: "entry 1: key, sha256: one of the two is needed" in server.stderr)
    assert has(401, 200, 200)
