"""Keys that come and go while the server runs."""

import signal
from hashlib import sha256

import httpx

from tests.support.serving import eventually, running_server

KEYS = {"first": "a-first-key-of-24-letters", "second": "a-second-key-of-25-letters"}


def entry(name: str, *fields: str) -> str:
    digest = sha256(KEYS[name].encode()).hexdigest()
    return "\n".join(["[[keys]]", f'name = "{name}"', f'sha256 = "{digest}"', *fields, ""])


def status_of(url: str, name: str) -> int:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    return httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, headers=headers, timeout=30).status_code


def test_keys_are_read_again_when_their_file_changes(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(entry("first"))
    with running_server(
        "--engine", "weightless", "--workers", "1", "--gateways", "2", "--keys-file", str(file)
    ) as server:
        assert (status_of(server.url, "first"), status_of(server.url, "second")) == (200, 401)
        file.write_text(entry("first") + entry("second", 'scopes = ["embed"]'))
        eventually(lambda: {status_of(server.url, "second") for _ in range(8)} == {200}, 30)
        file.write_text("this is no TOML")
        eventually(lambda: "keys not read again, nothing has changed" in server.stderr, 30)
        assert (status_of(server.url, "first"), status_of(server.url, "second")) == (200, 200)
        file.write_text(entry("second"))
        eventually(lambda: {status_of(server.url, "first") for _ in range(8)} == {401}, 30)
        assert status_of(server.url, "second") == 200
        # A new life of a gateway, and a new generation, know them, too.
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "reloaded: " in server.stderr, 60)
        assert {status_of(server.url, "first") for _ in range(8)} == {401}
        assert {status_of(server.url, "second") for _ in range(8)} == {200}
        assert not [key for key in KEYS.values() if key in server.stderr]


def test_operators_have_a_socket_of_their_own(tmp_path):
    path = tmp_path / "admin"
    flags = ["--engine", "weightless", "--workers", "1", "--gateways", "2"]
    with running_server(*flags, "--admin-uds", str(path)) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://admin", timeout=30) as admin:
            assert httpx.get(f"{server.url}/metrics").status_code == 404
            assert httpx.post(f"{server.url}/admin/reload").status_code == 404
            assert admin.get("/metrics").status_code == 200
            assert admin.get("/health").status_code == 200
            assert admin.post("/v1/embeddings", json={"input": "a"}).status_code == 404
            assert admin.post("/admin/reload").status_code == 202
            eventually(lambda: "reloaded: " in server.stderr, 60)
            assert [worker["life"] for worker in admin.get("/info").json()["workers"]] == [2]
    assert not path.exists()
