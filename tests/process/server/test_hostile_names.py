"""Names of models as an attacker sends them, by every way to name one in every dialect: each gets a clear error in the
dialect's shape, no other client's model is reached or told, and no name is written down (`running_server` searches)."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.canaries import WORD
from tests.support.serving import Server, eventually, running_server

OWN, OTHER = "own", "org/hidden"
KEYS = {"all": "a-key-for-all-of-the-models", "one": "a-key-for-one-of-the-models"}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.toml"


def write_keys(file: Path, models: str) -> None:
    digests = {name: sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    entries = [f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"\n' for name, digest in digests.items()]
    file.write_text("".join(entries) + f"models = {models}\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path, keys_file: Path) -> Iterator[Server]:
    write_keys(keys_file, f'["{OWN}"]')
    config = tmp_path_factory.mktemp("config") / "vecd.toml"
    config.write_text(
        f'[models.{OWN}]\nsource = "{minilm_folder}"\n'
        f'[models."{OTHER}"]\nsource = "{minilm_folder}"\naliases = ["hidden-alias"]\n'
    )
    with running_server(
        "--engine", "dummy", "--workers", "1", "--unknown-model", "refuse", "--log-format", "json",
        "--config", str(config), "--keys-file", str(keys_file),
    ) as server:  # fmt: skip
        yield server
        assert not [word for word in (WORD, *KEYS.values(), "Traceback") if word in server.stderr]


def exchange(server: Server, method: str, target: bytes, body: bytes, headers: bytes, key: str) -> tuple[int, str, Any]:
    """Status, head and body of the response. The head of the request is sent as it is."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = b"%b %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\napi-key: %b\r\n%b\r\n"
        with suppress(OSError):  # where it is refused before all of it is sent
            connection.sendall(head % (method.encode(), target, len(body), KEYS[key].encode(), headers) + body)
        received = b""
        try:
            while part := connection.recv(1 << 16):
                received += part
        except ConnectionResetError:
            assert received
    first, _, content = received.partition(b"\r\n\r\n")
    return int(first.split(b" ")[1]), first.decode("latin-1"), json.loads(content)


def post(server: Server, path: bytes, body: object, headers: bytes = b"", key: str = "one") -> tuple[int, str, Any]:
    """`body`: as JSON, with each surrogate as an escape."""
    content = json.dumps(body).encode()
    return exchange(server, "POST", path, content, b"Content-Type: application/json\r\n" + headers, key)


# --- what is sent ---------------------------------------------------------------------------------------------------

NAMES = [
    WORD + "x" * 2**20, WORD + "x" * 2000, f"{WORD}\0name", f"\0{OWN}", f"{OWN}\0", f"{WORD}\r\nx-evil: 1", f"{OWN}\n",
    f"../../../{WORD}", f"{OWN}/../{WORD}", f"{OTHER}/../{OWN}", f"/etc/{WORD}", f"http://evil.test/{WORD}",
    f"file:///{WORD}", f"\\\\evil\\{WORD}", f"\ud800{WORD}", f"{OWN}\udfff", f"{WORD}:{OWN}", f"{WORD}\u202e", "%00",
    "..", ".", "/", ":", " ", f"${{jndi:ldap://{WORD}}}", f"<script>{WORD}</script>", f"'; DROP {WORD}", "{}" + WORD,
    OTHER, "hidden", "hidden-alias", f"{OTHER}:latest", "ORG/HIDDEN", f"{OTHER}\0",
]  # fmt: skip
TEXT = "a text"
RANKED = {"query": "q", "documents": ["d"]}

Shape = Callable[[Any], object]
SHAPES: dict[str, Shape] = {
    "openai": lambda body: body["error"]["message"],
    "ollama": lambda body: body["error"],
    "tei": lambda body: (body["error_type"], body["error"])[1],
    "cohere": lambda body: body["message"],
    "vllm": lambda body: body["error"]["message"],
    "rerank": lambda body: body.get("detail") or body["error"],
}
PATHS = [
    ("/v1/embeddings", {"input": TEXT}, "openai"),
    ("/pooling", {"input": TEXT}, "vllm"),
    ("/score", {"text_1": "a", "text_2": "b"}, "vllm"),
    ("/tokenize", {"prompt": TEXT}, "vllm"),
    ("/api/embed", {"input": TEXT}, "ollama"),
    ("/api/embeddings", {"prompt": TEXT}, "ollama"),
    ("/v2/embed", {"texts": [TEXT], "input_type": "search_document"}, "cohere"),
    ("/v2/rerank", RANKED, "cohere"),
    ("/v1/rerank", RANKED, "rerank"),
]
"""Of dialects whose bodies name the model."""
PREFIXED = [*PATHS, ("/embed", {"inputs": TEXT}, "tei"), ("/rerank", {"query": "q", "texts": ["d"]}, "tei")]
SHOWN = 300
"""Characters of an error: the name in it is cut."""


def check(name: str, answer: tuple[int, str, Any], shape: str, statuses: tuple[int, ...]) -> None:
    status, head, body = answer
    assert status in statuses, (status, body)
    assert "x-vecd-model" not in head.lower()
    assert "x-evil" not in head.lower()
    message = SHAPES[shape](body)
    assert isinstance(message, str), body
    assert message
    assert len(message) < SHOWN
    assert "hidden" not in message.replace(name, ""), "it repeats what it was sent, and tells nothing"


@pytest.mark.parametrize(("path", "body", "shape"), PATHS, ids=[path for path, _, _ in PATHS])
def test_names_in_the_body(server: Server, path: str, body: dict[str, Any], shape: str) -> None:
    for name in NAMES:
        if name.strip():
            # Of a megabyte the parser of small fields does not read.
            check(name, post(server, path.encode(), {**body, "model": name}), shape, (404, 400, 422))


def quoted(name: str) -> bytes:
    """As it stands in a path, but for slashes."""
    return b"".join(
        b"%%%02x" % byte if byte <= 32 or byte >= 127 or byte in b"%?#\\" else bytes([byte])
        for byte in name.encode("utf-8", "surrogatepass")
    )


def shape_of(name: str, shape: str, *, is_prefix: bool = False) -> str:
    """A path that is no UTF-8 is refused before it is looked at, and one with a control character before the prefix is
    taken from it."""
    return "openai" if any((is_prefix and char < " ") or "\ud800" <= char <= "\udfff" for char in name) else shape


IN_PATHS = [name for name in NAMES if len(name) < 5000 and not name.startswith(f"{OWN}/")]
"""A longer head is refused. What follows the name of a model that the key reaches is the path of a route."""


@pytest.mark.parametrize(("path", "body", "shape"), PREFIXED, ids=[path for path, _, _ in PREFIXED])
def test_names_in_the_prefix_of_the_path(server: Server, path: str, body: dict[str, Any], shape: str) -> None:
    for name in IN_PATHS:
        for written in (quoted(name), quoted(name).replace(b"/", b"%2F")):
            answer = post(server, b"/m/" + written + path.encode(), body)
            check(name, answer, shape_of(name, shape, is_prefix=True), (404, 400))


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/openai/deployments/{}/embeddings", {"input": TEXT}, "openai"),
        ("/v1/engines/{}/embeddings", {"input": TEXT}, "openai"),
        ("/models/{}", {"inputs": TEXT}, "tei"),
        ("/pipeline/feature-extraction/{}", {"inputs": TEXT}, "tei"),
        ("/v1/models/{}", None, "openai"),
        ("/api/show", {"model": "{}"}, "ollama"),
        ("/health?model={}", None, "openai"),
        ("/info?model={}", None, "openai"),
    ],
)
def test_names_in_other_places(server: Server, path: str, body: dict[str, Any] | None, shape: str) -> None:
    for name in IN_PATHS:
        is_in_body = body is not None and "model" in body
        if not name.strip(" /.:"):
            continue  # which leaves another path
        written = quoted(name).replace(b"&", b"%26")
        target = path.encode() if is_in_body else path.encode().replace(b"{}", written)
        given = json.dumps({"model": name} if is_in_body else body).encode() if body is not None else b""
        answer = exchange(server, "GET" if body is None else "POST", target, given, b"", "one")
        check(name, answer, shape if is_in_body or "?" in path else shape_of(name, shape), (404, 400))


def test_too_long_a_head_is_refused(server: Server) -> None:
    name = NAMES[0].encode()
    assert post(server, b"/m/" + name + b"/v1/embeddings", {"input": TEXT})[0] in (414, 431)
    assert post(server, b"/v1/embeddings", {"input": TEXT}, b"x-vecd-model: " + name + b"\r\n")[0] == 431


def test_the_other_model_is_there_for_its_own_clients(server: Server) -> None:
    """By the same names that the key of one model does not know."""
    for name in ("hidden-alias", OTHER, f"{OTHER}:latest", "ORG/HIDDEN"):
        for target, body, headers in (
            (b"/v1/embeddings", {"input": TEXT, "model": name}, b""),
            (b"/v1/embeddings", {"input": TEXT}, b"x-vecd-model: " + name.encode() + b"\r\n"),
            (b"/m/" + name.encode() + b"/v1/embeddings", {"input": TEXT}, b""),
            (b"/m/" + name.encode().replace(b"/", b"%2F") + b"/v1/embeddings", {"input": TEXT}, b""),
        ):
            status, head, found = post(server, target, body, headers, key="all")
            assert (status, found["model"]) == (200, OTHER), found
            assert f"x-vecd-model: {OTHER}" in head
            assert post(server, target, body, headers)[0] == 404


def test_names_in_the_header(server: Server) -> None:
    for name in NAMES:
        value = name.encode("utf-8", "surrogatepass")
        if name.strip() and b"\n" not in value:
            answer = post(server, b"/v1/embeddings", {"input": TEXT}, b"x-vecd-model: " + value + b"\r\n")
            check(name, answer, "openai", (404, 400, 431))


def test_keys_get_other_models_while_the_server_runs(server: Server, keys_file: Path) -> None:
    def models_of(key: str) -> set[str]:
        status, _, found = exchange(server, "GET", b"/v1/models", b"", b"", key)
        assert status == 200
        return {model["id"].partition(":")[0] for model in found["data"]}

    assert (models_of("one"), models_of("all")) == ({OWN}, {OWN, OTHER, "hidden-alias"})
    write_keys(keys_file, '["nothing"]')
    eventually(lambda: "entry 2: models: name 1: is neither" in server.stderr, 30)
    assert models_of("one") == {OWN}, "a wrong file changes nothing"
    write_keys(keys_file, '["hidden-alias"]')
    eventually(lambda: models_of("one") == {OTHER, "hidden-alias"}, 30)
    assert post(server, b"/v1/embeddings", {"input": TEXT})[2]["model"] == OTHER
    assert post(server, b"/v1/embeddings", {"input": TEXT, "model": OWN})[0] == 404
