"""The identity of models, as a server of several says it and as requests demand it."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import Server, eventually, running_server

FORMAT = re.compile(r"[0-9a-f]{32};dtype=float32")
OTHER = "0" * 32
IN_EACH_DIALECT: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "text"},
    "/embed": {"inputs": "text"},
    "/v2/embed": {"texts": ["text"], "input_type": "search_query"},
    "/api/embed": {"model": "a", "input": "text"},
    "/pooling": {"input": "text"},
    "/tokenize": {"prompt": "text"},
    "/decode": {"ids": [101, 102]},
}


@pytest.fixture(scope="module")
def config(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity") / "vecd.toml"
    write(path, minilm_folder)
    return path


def write(config: Path, source: Path, prompt: str = "query: ") -> None:
    config.write_text(
        f'[models.a]\nsource = "{source}"\nworkers = 1\nprompts = {{ query = "{prompt}" }}\n'
        "[models.a.aliases.plain]\n"
        "[models.a.aliases.short]\ndimensions = 384\n"
        f'[models.b]\nsource = "{source}"\nworkers = 1\nload = "demand"\n'
    )


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[Server]:
    flags = ["--engine", "dummy", "--gateways", "2", "--cors-origins", "*", "--config", str(config)]
    with running_server(*flags) as server:
        yield server


def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}{path}", json=body, headers=names, timeout=30)


def identity(server: Server, model: str = "a") -> str:
    return post(server, f"/m/{model}/v1/embeddings", {"input": "text"}).headers["x-vecd-identity"]


def message(response: httpx.Response) -> str:
    body = response.json()
    error = body.get("error", body)
    return str(error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize("path", IN_EACH_DIALECT)
def test_each_dialect_says_it_and_refuses_another(server: Server, path: str) -> None:
    own, body = identity(server), IN_EACH_DIALECT[path]
    path = f"/m/a{path}"
    assert FORMAT.fullmatch(own)
    assert post(server, path, body).headers["x-vecd-identity"] == own
    for demand in (own, own.partition(";")[0]):
        assert post(server, path, body, if_vecd_identity=demand).status_code == 200
    for demand in (OTHER, f"{OTHER};dtype=float32", own.replace("float32", "int8")):
        response = post(server, path, body, if_vecd_identity=demand)
        assert response.status_code == 412
        assert response.headers["x-vecd-identity"] == own
        assert demand in message(response)
        assert own in message(response)
    for malformed in ("", "*", own.upper(), f"{own};", own[1:], f'"{own}"'):
        response = post(server, path, body, if_vecd_identity=malformed)
        assert response.status_code == 400, malformed
        assert "if-vecd-identity" in message(response)


def test_the_code_is_openai_s_and_nothing_is_computed(server: Server) -> None:
    def num_batches() -> int:
        return sum(worker["batches"] for worker in server.info()["workers"])

    assert identity(server)  # the counter of its batch is up to date once another request is answered
    before = num_batches()
    response = post(server, "/m/a/v1/embeddings", {"input": "text"}, if_vecd_identity=OTHER)
    assert response.json()["error"]["code"] == "identity_mismatch"
    assert num_batches() == before


def test_an_error_of_the_model_s_route_says_it_and_others_do_not(server: Server) -> None:
    own = identity(server)
    assert post(server, "/m/a/v1/embeddings", {"input": []}).headers["x-vecd-identity"] == own
    assert post(server, "/v1/embeddings", {"model": "a", "input": []}).headers["x-vecd-identity"] == own
    for name in ("a", "short"):
        response = httpx.post(f"{server.url}/m/{name}/v1/embeddings", content=b"{")
        assert (response.status_code, response.headers["x-vecd-identity"]) == (400, identity(server, name))
    for path in ("/health", "/info", "/metrics", "/v1/models"):
        assert "x-vecd-identity" not in httpx.get(f"{server.url}{path}").headers
    assert httpx.get(f"{server.url}/m/a/v1/models").headers["x-vecd-identity"] == own


def test_an_alias_with_defaults_has_its_own(server: Server) -> None:
    own, plain, short = identity(server), identity(server, "plain"), identity(server, "short")
    assert own == plain != short
    assert short == post(server, "/v1/embeddings", {"model": "short", "input": "text"}).headers["x-vecd-identity"]
    assert post(server, "/m/short/embed", {"inputs": "text"}, if_vecd_identity=own).status_code == 412
    assert post(server, "/m/short/embed", {"inputs": "text"}, if_vecd_identity=short).status_code == 200
    listed = {each["id"]: each["identity"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert {name: listed[name] for name in ("a", "plain", "short")} == {"a": own, "plain": own, "short": short}
    described = httpx.get(f"{server.url}/m/a/info").json()["model"]
    assert (described["identity"], described["alias_identities"]) == (own, {"short": short})
    metrics = httpx.get(f"{server.url}/metrics").text
    for model, value in (("a", own), ("short", short)):
        assert f'vecd_model_identity_info{{identity="{value}",model="{model}"}} 1.0' in metrics


def test_a_web_page_may_read_it(server: Server) -> None:
    response = post(server, "/m/a/embed", {"inputs": "text"}, origin="https://example.org")
    assert "x-vecd-identity" in response.headers["access-control-expose-headers"].split(", ")


def test_the_document_of_the_api_has_the_header_and_the_status(server: Server) -> None:
    operation = httpx.get(f"{server.url}/openapi.json").json()["paths"]["/v1/embeddings"]["post"]
    assert "if-vecd-identity" in {parameter["name"] for parameter in operation["parameters"]}
    assert "412" in operation["responses"]
    assert "x-vecd-identity" in operation["responses"]["200"]["headers"]


def test_a_model_that_is_not_loaded_is_loaded_for_a_number_format_alone(config: Path) -> None:
    with running_server("--engine", "dummy", "--config", str(config)) as server:

        def state() -> str:
            return str(httpx.get(f"{server.url}/m/b/health").json()["state"])

        response = post(server, "/m/b/embed", {"inputs": "text"}, if_vecd_identity=OTHER)
        assert (response.status_code, state()) == (412, "unloaded")
        digest = re.findall("[0-9a-f]{32}", message(response))[1]
        assert "x-vecd-identity" not in response.headers, "the number format is not known"
        assert httpx.get(f"{server.url}/m/b/info").json()["model"]["identity"] is None
        response = post(server, "/m/b/embed", {"inputs": "text"}, if_vecd_identity=f"{OTHER};dtype=float32")
        assert (response.status_code, state()) == (412, "unloaded")
        response = post(server, "/m/b/embed", {"inputs": "text"}, if_vecd_identity=f"{digest};dtype=int8")
        assert (response.status_code, state()) == (412, "ready")
        assert f"{digest};dtype=float32" in message(response)
        response = post(server, "/m/b/embed", {"inputs": "text"}, if_vecd_identity=f"{digest};dtype=float32")
        assert (response.status_code, response.headers["x-vecd-identity"]) == (200, f"{digest};dtype=float32")
        # Both models have the same files, and other prompts.
        assert identity(server) != f"{digest};dtype=float32"


def test_a_reload_has_another_and_a_request_that_crosses_it_is_refused(
    config: Path, minilm_folder: Path, tmp_path: Path
) -> None:
    own_config = tmp_path / "vecd.toml"
    own_config.write_text(config.read_text())
    with running_server("--engine", "dummy", "--config", str(own_config)) as server:
        before = identity(server)
        head = (
            f"POST /m/a/embed HTTP/1.1\r\nhost: x\r\ncontent-length: 17\r\nif-vecd-identity: {before}\r\n"
            'connection: close\r\n\r\n{"inputs"'
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as waiting:
            waiting.sendall(head.encode())
            write(own_config, minilm_folder, prompt="passage: ")
            assert "reloaded" in server.reload_outcome()
            eventually(lambda: identity(server) != before)
            waiting.sendall(b':"text"}')
            response = b"".join(iter(lambda: waiting.recv(65536), b"")).decode()
        after = identity(server)
        assert response.startswith("HTTP/1.1 412")
        assert f"x-vecd-identity: {after}" in response
        assert before in response
        assert post(server, "/m/a/embed", {"inputs": "text"}, if_vecd_identity=before).status_code == 412
        assert post(server, "/m/a/embed", {"inputs": "text"}, if_vecd_identity=after).status_code == 200
        write(own_config, minilm_folder)
        server.reload_outcome()
        eventually(lambda: identity(server) == before)


def test_a_gateway_that_is_started_again_knows_it(server: Server) -> None:
    own = identity(server)
    with server.client_of(1) as other:
        killed = other.get("/info").json()["gateways"][0]["pid"]
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: other.get("/info").json()["gateways"][0]["pid"] not in (0, killed), timeout_s=60)
    with server.client_of(0) as client:
        response = client.post("/m/a/embed", json={"inputs": "text"}, headers={"if-vecd-identity": own})
        assert (response.status_code, response.headers["x-vecd-identity"]) == (200, own)
