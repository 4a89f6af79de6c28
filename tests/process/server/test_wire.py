"""How the clients that people have put a request on the wire: one server without a model, raw sockets, curl, the JDK.

What each of them sends was seen on a socket: stock Java clients offer h2c, curl waits for 100 Continue before a large
body, nginx speaks HTTP/1.0, gateways compress, and everybody writes the path in another way.
"""

import gzip
import json
import shutil
import socket
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.serving import Server, running_server
from vecd.gateway.http.framing import zstd

TIMEOUT_S = 60.0
BODY = b'{"input":"hi"}'
MAX_BODY_BYTES = 3_000_000
PAGE = "https://page.example"
CL = b"Content-Length: %d" % len(BODY)
TE = b"Transfer-Encoding: chunked"
H2C = (
    b"Connection: Upgrade, HTTP2-Settings",
    b"Upgrade: h2c",
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAA",
)


def head(line: bytes, *headers: bytes) -> bytes:
    return b"".join(part + b"\r\n" for part in (line, b"Host: x", *headers)) + b"\r\n"


def post(*headers: bytes, path: str = "/v1/embeddings", body: bytes = BODY, version: str = "1.1") -> bytes:
    """With a Content-Length, unless a header says that the body is in chunks."""
    line = f"POST {path} HTTP/{version}".encode()
    framing = () if TE in headers else (b"Content-Length: %d" % len(body),)
    return head(line, *headers, *framing) + body


def chunks(body: bytes = BODY, num_bytes: int = 5) -> bytes:
    pieces = [body[at : at + num_bytes] for at in range(0, len(body), num_bytes)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def vector(self) -> list[float]:
        [item] = json.loads(self.body)["data"]
        return item["embedding"]

    @property
    def error(self) -> dict[str, str | None]:
        assert self.headers["content-type"] == "application/json"
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class Client:
    def __init__(self, server: Server) -> None:
        self.sock = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.sock.makefile("rb")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self.sock.close()

    def send(self, data: bytes, *, byte_by_byte: bool = False) -> None:
        with suppress(ConnectionError):  # it may have been refused before its end
            for at in range(len(data)) if byte_by_byte else ():
                self.sock.sendall(data[at : at + 1])
            if not byte_by_byte:
                self.sock.sendall(data)

    def answer(self) -> Answer:
        """The next one, an interim one too."""
        lines = []
        while (line := self._file.readline()) not in (b"\r\n", b""):
            lines.append(line.decode("latin-1").rstrip("\r\n"))
        assert lines, "closed without an answer"
        version, status, *_ = lines[0].split(" ")
        assert version == "HTTP/1.1"
        headers = dict(line.split(": ", 1) for line in lines[1:])
        assert "transfer-encoding" not in headers
        if status == "100":
            assert "content-length" not in headers
            return Answer(100, headers, b"")
        return Answer(int(status), headers, self._file.read(int(headers["content-length"])))

    def is_closed(self) -> bool:
        """Waits for it."""
        try:
            return self._file.read() == b""
        except ConnectionResetError:
            return True


def exchange(server: Server, data: bytes) -> Answer:
    with Client(server) as client:
        client.send(data)
        return client.answer()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--engine", "dummy", "--workers", "1", "--max-body-bytes", str(MAX_BODY_BYTES))
    named = ("--served-model-name", "org/name", "--strict-model")
    with running_server(*flags, *named, "--cors-origins", PAGE) as running:
        yield running
        assert "Traceback" not in running.stderr


@pytest.fixture(scope="module")
def vector(server: Server) -> list[float]:
    """Of the text of BODY, asked for in the plainest way."""
    return exchange(server, post()).vector


INPUTS = b'{"inputs":"hi"}'


def test_a_model_may_be_named_by_the_path(server):
    for path, body, status in (
        ("/openai/deployments/org%2Fname/embeddings?api-version=1", BODY, 200),
        ("/engines/other/embeddings", BODY, 404),
        ("/engines/org/name/embeddings", b'{"input":"hi","model":"other"}', 200),
        ("/engines/other/embeddings", b'{"input":"%b"}' % (b"large " * 20_000), 404),
        ("/models/other", INPUTS, 404),
        ("/hf-inference/models/org%2Fname/pipeline/feature-extraction", INPUTS, 200),
    ):
        answer = exchange(server, post(path=path, body=body))
        assert answer.status == status, (path, answer)
        if status == 404 and body is INPUTS:
            assert b"does not exist; this server has 'org/name'" in answer.body
        elif status == 404:
            assert answer.error["code"] == "model_not_found"


# --- framing ------------------------------------------------------------------------------------------------------

FRAMED = {
    "another spelling of the path": post(path="//v1//%65mbeddings/?api-version=2024-02-01"),
    "chunks of one byte": post(TE, body=chunks(num_bytes=1)),
    "h2c, Expect": post(*H2C, b"Expect: 100-continue"),
    "WebSocket": post(b"Connection: Upgrade", b"Upgrade: websocket"),
    "HTTP/1.0, kept alive": post(b"Connection: keep-alive", version="1.0"),
    "Bearer undefined": post(b"Authorization: Bearer undefined", b"api-key:"),
}


@pytest.mark.parametrize("name", FRAMED)
def test_a_body_is_not_lost_and_the_connection_goes_on(server, vector, name):
    with Client(server) as client:
        client.send(FRAMED[name] + FRAMED["h2c, Expect"] + head(b"GET /live HTTP/1.1"), byte_by_byte=True)
        answers: list[Answer] = []
        while len(answers) < 3:
            if (answer := client.answer()).status != 100:
                answers.append(answer)
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert answers[0].vector == answers[1].vector == vector
        assert all(answer.headers["x-request-id"] for answer in answers)
        assert answers[0].headers.get("connection") == ("keep-alive" if "1.0" in name else None)


@pytest.mark.parametrize(
    ("line", "header", "status"),
    [
        (b"POST /v1/embeddings HTTP/1.1", b"Content-Length: %d" % (MAX_BODY_BYTES + 1), 413),
        (b"POST /nothing HTTP/1.1", b"A: b", 404),
    ],
)
def test_who_expects_100_continue_is_refused_at_once(server, line, header, status):
    framings = () if header.startswith(b"Content-Length") else (TE,)
    with Client(server) as client:
        client.send(head(line, b"Expect: 100-continue", header, *framings))
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert answer.error["type"] == "invalid_request_error"
        assert client.is_closed()


# --- compressed ---------------------------------------------------------------------------------------------------


COMPRESSED = {
    "gzip": (b"GZIP", b"".join(map(gzip.compress, (BODY[:6], BODY[6:])))),
    "zstd": (b"zstd", zstd.compress(BODY + b" " * 1_000_000)),
    "at the limit": (b"gzip", gzip.compress(BODY + b" " * (MAX_BODY_BYTES - len(BODY)))),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_bodies(server, vector, name):
    coding, body = COMPRESSED[name]
    with Client(server) as client:
        for data in (post(b"Content-Encoding: " + coding, TE, body=chunks(body, 100)), post()):
            client.send(data, byte_by_byte=len(data) < 3000)
            assert client.answer().vector == vector


@pytest.mark.parametrize("coding", [b"gzip", b"zstd"])
def test_bombs_take_no_more_memory_than_is_allowed_and_others_are_served(server, coding):
    unit = b" " * 1_000_000
    compressor = zlib.compressobj(wbits=31) if coding == b"gzip" else zstd.ZstdCompressor()
    bomb = b"".join(compressor.compress(unit) for _ in range(200)) + compressor.flush()
    assert len(bomb) < 250_000
    gateway: psutil.Process = server.gateway()
    before = gateway.memory_info().rss
    clients = [Client(server) for _ in range(10)]
    try:
        for client in clients:
            client.send(post(b"Content-Encoding: " + coding, body=bomb))
        assert exchange(server, post()).status == 200
        assert {client.answer().status for client in clients} <= {413, 429}
    finally:
        for client in clients:
            client.__exit__()
    # 10 times 3 MB, as much again for what is sent, and what a process keeps; 2 GB are what they would become.
    assert gateway.memory_info().rss - before < 150_000_000


# --- web pages ----------------------------------------------------------------------------------------------------


def origin(name: str) -> bytes:
    return f"Origin: {name}".encode()


ANSWERS_FOR_PAGES = {
    "an answer": (post(origin(PAGE)), 200),
    "no vector": (post(origin(PAGE), body=b"{}"), 400),
    "no path": (post(origin(PAGE), path="/nothing"), 404),
    "another method": (head(b"GET /v1/embeddings HTTP/1.1", origin(PAGE)), 405),
    "too long": (head(b"POST /v1/embeddings HTTP/1.1", origin(PAGE), b"Content-Length: 99999999"), 413),
    "too long once inflated": (
        post(origin(PAGE), b"Content-Encoding: gzip", body=gzip.compress(b" " * (MAX_BODY_BYTES + 1))), 413
    ),
    "another coding": (post(origin(PAGE), b"Content-Encoding: br"), 415),
    "a bad Host": (b"GET /live HTTP/1.1\r\nOrigin: " + PAGE.encode() + b"\r\nHost: a b\r\n\r\n", 400),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS_FOR_PAGES)
def test_a_page_can_read_every_answer(server, name):
    data, status = ANSWERS_FOR_PAGES[name]
    answer = exchange(server, data)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, PAGE)
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after"} <= set(exposed)
    assert {name for name in answer.headers if name.startswith("x-")} <= set(exposed)


# --- clients ------------------------------------------------------------------------------------------------------


def curl(server: Server, *arguments: str, data: bytes = BODY) -> tuple[int, str, bytes]:
    """Status, version and body."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    command = ["curl", "--silent", "--show-error", "--max-time", str(TIMEOUT_S), "--noproxy", "*", "--write-out"]
    command += ["\n%{http_code} %{http_version}", "--data-binary", "@-", f"{server.url}/v1/embeddings", *arguments]
    done = subprocess.run(command, input=data, capture_output=True, timeout=2 * TIMEOUT_S, check=False)
    if done.returncode == 2:
        pytest.skip(f"this curl cannot: {done.stderr.decode().strip()}")
    assert done.returncode == 0, done.stderr
    body, _, written = done.stdout.rpartition(b"\n")
    status, version = written.decode().split()
    return int(status), version, body


LARGE = b'{"input":["hi"' + b" " * 1_500_000 + b"]}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--http1.0",),
        ("--http2", "--compressed"),
        ("--header", "Transfer-Encoding: chunked", "--http2"),
        ("--header", "Expect: 100-continue"),
        ("--header", "Content-Type:", "--header", "Connection: close"),
    ],
    ids=" ".join,
)
def test_curl(server, vector, arguments):
    status, version, body = curl(server, *arguments, data=LARGE)
    assert (status, version) == (200, "1.1")
    assert json.loads(body)["data"][0]["embedding"] == vector


@pytest.fixture
def java(tmp_path: Path) -> list[str]:
    if shutil.which("java") is None:
        pytest.skip("there is no java")
    flags = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", f"-Djava.io.tmpdir={tmp_path}", "-XX:-UsePerfData"]
    probe = subprocess.run(["java", "--list-modules"], capture_output=True, timeout=TIMEOUT_S, check=False)
    if b"java.net.http" not in probe.stdout or b"jdk.compiler" not in probe.stdout:
        pytest.skip("this java has no HTTP client, or cannot compile")
    return ["java", *flags, str(Path(__file__).with_name("Wire.java"))]


@pytest.mark.full
def test_the_jdk_s_client_as_it_is_by_default(server, java):
    done = subprocess.run(
        [*java, f"{server.url}/v1/embeddings"], capture_output=True, timeout=2 * TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = [line.split() for line in done.stdout.decode().splitlines()]
    assert {version for _, _, version, _ in answers} == {"HTTP_1_1"}
    assert {what: int(status) for what, status, _, _ in answers} == {
        "content-length": 200, "chunked": 200, "large": 200, "large-chunked": 200, "expect": 200,
        "expect-chunked": 200, "get": 405, "again": 200,
    }  # fmt: skip
    sizes = {what: num_bytes for what, _, _, num_bytes in answers}
    assert sizes["content-length"] == sizes["chunked"] == sizes["expect-chunked"] == sizes["again"]
