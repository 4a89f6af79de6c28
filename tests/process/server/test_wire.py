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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.serving import Server, eventually, running_server
from vecd.gateway.http.decompress import zstd

TIMEOUT_S = 60.0
BODY = b'{"input":"hi"}'
MAX_BODY_BYTES = 3_000_000
KEY = "a-key-for-tests"
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

    def answer(self, *, is_head: bool = False) -> Answer:
        """The next one, an interim one too."""
        lines = []
        while (line := self._file.readline()) not in (b"\r\n", b""):
            lines.append(line.decode("latin-1").rstrip("\r\n"))
        assert lines, "closed without an answer"
        version, status, *_ = lines[0].split(" ")
        assert version == "HTTP/1.1"
        headers = dict(line.split(": ", 1) for line in lines[1:])
        assert "transfer-encoding" not in headers
        if int(status) in (100, 204):
            assert "content-length" not in headers
            return Answer(int(status), headers, b"")
        num_bytes = 0 if is_head else int(headers["content-length"])
        return Answer(int(status), headers, self._file.read(num_bytes))

    def is_closed(self) -> bool:
        """Waits for it."""
        try:
            return self._file.read() == b""
        except ConnectionResetError:
            return True


def exchange(server: Server, data: bytes, *, byte_by_byte: bool = False) -> Answer:
    with Client(server) as client:
        client.send(data, byte_by_byte=byte_by_byte)
        return client.answer()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--engine", "weightless", "--workers", "1", "--max-body-bytes", str(MAX_BODY_BYTES))
    with running_server(*flags, "--cors-origins", f"{PAGE},app://obsidian.md") as running:
        yield running
        assert "Traceback" not in running.stderr


@pytest.fixture(scope="module")
def vector(server: Server) -> list[float]:
    """Of the text of BODY, asked for in the plainest way."""
    return exchange(server, post()).vector


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """With a key, and open to pages of any origin."""
    flags = ("--engine", "weightless", "--workers", "1", "--cors-origins", "*", "--max-requests", "1")
    with running_server(*flags, env={"VECD_API_KEY": KEY}) as running:
        yield running


# --- paths --------------------------------------------------------------------------------------------------------

PATHS = [
    "/v1/embeddings", "/v1/embeddings/", "//v1/embeddings", "/v1//embeddings", "/v1/v1/embeddings", "/embeddings",
    "//embeddings", "/embeddings/", "/v1/embeddings/embeddings", "/v1/embeddings/v1/embeddings",
    "/v1/embeddings?api-version=2024-02-01", "/v1/%65mbeddings", "/v1%2Fembeddings", "/v1/embeddings#a",
    "http://elsewhere.example/v1/embeddings", "/openai/deployments/some-model/embeddings?api-version=2024-02-01",
    "/openai/deployments/org%2Fmodel/embeddings", "/openai/v1/embeddings", "/v1/engines/ada/embeddings",
    "/engines/org/model/embeddings/",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_every_way_to_write_the_path_is_served_without_a_redirect(server, vector, path):
    answer = exchange(server, post(path=path))
    assert answer.status == 200, answer
    assert answer.vector == vector


@pytest.mark.parametrize(
    ("path", "exact"),
    [
        ("/embed/", "/embed"),
        ("//embed", "/embed"),
        ("//api/embed", "/api/embed"),
        ("/api/api/embed", "/api/embed"),
        ("/api/embed/api/embed", "/api/embed"),
        ("/v1/v1/embed", "/v1/embed"),
        ("/v2/embed/", "/v2/embed"),
        ("/v2/embed/v2/embed", "/v2/embed"),
    ],
)
def test_other_dialects_paths_are_as_tolerant(server, path, exact):
    answers = [exchange(server, post(path=spelling, body=b'{"model":5,"inputs":5}')) for spelling in (path, exact)]
    assert answers[0].status == answers[1].status
    assert answers[0].status in (400, 422)
    assert answers[0].body == answers[1].body, "in the shape of the same dialect"


INPUTS = b'{"inputs":"hi"}'


def test_a_model_may_be_named_by_the_path(tmp_path):
    flags = ("--engine", "weightless", "--workers", "1", "--served-model-name", "org/name", "--strict-model")
    with running_server(*flags) as strict:
        for path, body, status in (
            ("/openai/deployments/org%2Fname/embeddings?api-version=1", BODY, 200),
            ("/v1/engines/org/name/embeddings/", BODY, 200),
            ("/engines/other/embeddings", BODY, 404),
            ("/engines/other/embeddings", b'{"input":"hi","model":null}', 404),
            ("/engines/other/embeddings", b'{"input":"hi","model":"org/name"}', 404),
            ("/engines/org/name/embeddings", b'{"input":"hi","model":"other"}', 200),
            ("/engines/other/embeddings", b'{"input":"%b"}' % (b"large " * 20_000), 404),
            ("/v1/openai/deployments/org/name/embeddings", BODY, 200),
            ("/v1/deployments/other/embeddings", BODY, 404),
            ("/models/org/name", INPUTS, 200),
            ("/models/other", INPUTS, 404),
            ("/models/org/name/pipeline/feature-extraction", INPUTS, 200),
            ("/models/other/pipeline/feature-extraction", INPUTS, 404),
            ("/pipeline/feature-extraction/org/name", INPUTS, 200),
            ("/pipeline/feature-extraction/org%2Fname", INPUTS, 200),  # langchain4j encodes the slash
            ("/models/org%2Fname/pipeline/feature-extraction", INPUTS, 200),
            ("/hf-inference/models/org/name/pipeline/feature-extraction", INPUTS, 200),
            ("/hf-inference/models/other/pipeline/feature-extraction", INPUTS, 404),
        ):
            answer = exchange(strict, post(path=path, body=body))
            assert answer.status == status, (path, answer)
            if status == 404 and body is INPUTS:
                assert b"does not exist; this server has 'org/name'" in answer.body
            elif status == 404:
                assert answer.error["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1", "/nothing", "/v1/embeddings/x", "/v1/nothing/", "/V1/embeddings"])
def test_a_path_that_is_none_names_the_right_one(server, path):
    answer = exchange(server, post(path=path))
    assert answer.status == 404
    assert "POST /v1/embeddings" in str(answer.error["message"])


def test_other_methods(server):
    with Client(server) as client:
        for method in (b"GET", b"PUT", b"DELETE", b"PATCH", b"TRACE"):
            client.send(head(method + b" /v1/embeddings HTTP/1.1"))
            answer = client.answer()
            assert (answer.status, answer.headers["allow"]) == (405, "OPTIONS, POST")
            assert answer.error["code"] == "method_not_allowed"
        client.send(head(b"HEAD /v1/embeddings HTTP/1.1"))
        answer = client.answer(is_head=True)
        assert (answer.status, answer.headers["allow"]) == (405, "OPTIONS, POST")
        for path, allow in (
            (b"/v1/embeddings/", "OPTIONS, POST"),
            (b"/v1/models", "GET, HEAD, OPTIONS"),
            (b"*", "GET, HEAD, OPTIONS, POST"),
        ):
            client.send(head(b"OPTIONS %b HTTP/1.1" % path))
            answer = client.answer()
            assert (answer.status, answer.headers["allow"]) == (204, allow)
        client.send(head(b"HEAD /v1/models HTTP/1.1"))
        assert client.answer(is_head=True).status == 200
        client.send(post())
        assert client.answer().status == 200


# --- framing ------------------------------------------------------------------------------------------------------

FRAMED = {
    "no content type": post(),
    "a content type of a form": post(b"Content-Type: application/x-www-form-urlencoded"),
    "text": post(b"Content-Type: text/plain"),
    "a charset": post(b"Content-Type: application/json; charset=utf-8"),
    "a content type that is none": post(b"Content-Type: \xff;;"),
    "chunks": post(TE, body=chunks()),
    "chunks of one byte": post(TE, body=chunks(num_bytes=1)),
    "h2c, Content-Length": post(*H2C),
    "h2c, chunks": post(*H2C, TE, body=chunks()),
    "h2c, Expect": post(*H2C, b"Expect: 100-continue"),
    "WebSocket": post(b"Connection: Upgrade", b"Upgrade: websocket"),
    "HTTP/1.0, kept alive": post(b"Connection: keep-alive", version="1.0"),
    "an empty Authorization": post(b"Authorization:"),
    "Bearer undefined": post(b"Authorization: Bearer undefined", b"api-key:"),
    "Bearer null": post(b"Authorization: Bearer null"),
    "Bearer None": post(b"Authorization: Bearer None"),
}


@pytest.mark.parametrize("byte_by_byte", [False, True], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("name", FRAMED)
def test_a_body_is_not_lost_and_the_connection_goes_on(server, vector, name, byte_by_byte):
    with Client(server) as client:
        client.send(FRAMED[name] + FRAMED["h2c, chunks"] + head(b"GET /live HTTP/1.1"), byte_by_byte=byte_by_byte)
        answers: list[Answer] = []
        while len(answers) < 3:
            if (answer := client.answer()).status != 100:
                answers.append(answer)
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert answers[0].vector == answers[1].vector == vector
        assert all(answer.headers["x-request-id"] for answer in answers)
        assert answers[0].headers.get("connection") == ("keep-alive" if "1.0" in name else None)


@pytest.mark.parametrize("byte_by_byte", [False, True], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("headers", [(), H2C, (b"Expect: 100-continue",), (b"Connection: close",)])
def test_http_1_0_is_answered_once_and_closed(server, vector, headers, byte_by_byte):
    with Client(server) as client:
        client.send(post(*headers, version="1.0"), byte_by_byte=byte_by_byte)
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert answer.vector == vector
        assert client.is_closed()


def test_http_1_0_knows_no_chunks(server):
    assert exchange(server, post(TE, body=chunks(), version="1.0")).status == 400


@pytest.mark.parametrize("framing", [CL, TE])
def test_who_expects_100_continue_gets_it_before_the_body(server, vector, framing):
    with Client(server) as client:
        for _ in range(2):
            client.send(head(b"POST /v1/embeddings HTTP/1.1", b"Expect: 100-continue", framing))
            assert client.answer() == Answer(100, {}, b"")
            client.send(BODY if framing is CL else chunks())
            assert client.answer().vector == vector


@pytest.mark.parametrize(
    ("line", "header", "status"),
    [
        (b"POST /v1/embeddings HTTP/1.1", b"Content-Length: %d" % (MAX_BODY_BYTES + 1), 413),
        (b"POST /v1/embeddings HTTP/1.1", b"Content-Encoding: br", 415),
        (b"POST /nothing HTTP/1.1", b"A: b", 404),
        (b"PUT /v1/embeddings HTTP/1.1", b"A: b", 405),
    ],
)
@pytest.mark.parametrize("framing", [CL, TE])
def test_who_expects_100_continue_is_refused_at_once(server, line, header, status, framing):
    framings = () if header.startswith(b"Content-Length") else (framing,)
    with Client(server) as client:
        client.send(head(line, b"Expect: 100-continue", header, *framings))
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert answer.error["type"] == "invalid_request_error"
        assert client.is_closed()


def test_two_lengths_are_refused(server):
    answer = exchange(server, head(b"POST /v1/embeddings HTTP/1.1", CL, TE) + chunks())
    assert answer.status == 400


# --- compressed ---------------------------------------------------------------------------------------------------


def deflate_alone(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


HALVES = BODY[:6], BODY[6:]
COMPRESSED = {
    "gzip": (b"gzip", gzip.compress(BODY)),
    "GZIP": (b"GZIP", gzip.compress(BODY)),
    "x-gzip": (b"x-gzip", gzip.compress(BODY)),
    "deflate": (b"deflate", zlib.compress(BODY)),
    "deflate without zlib's header": (b"deflate", deflate_alone(BODY)),
    "zstd": (b"zstd", zstd.compress(BODY)),
    "identity": (b"identity", BODY),
    "none": (b"", BODY),
    "two members of gzip": (b"gzip", b"".join(map(gzip.compress, HALVES))),
    "two frames of zstd": (b"zstd", b"".join(map(zstd.compress, HALVES))),
    "large": (b"gzip", gzip.compress(BODY + b" " * 1_000_000)),
    "large zstd": (b"zstd", zstd.compress(BODY + b" " * 1_000_000)),
    "at the limit": (b"gzip", gzip.compress(BODY + b" " * (MAX_BODY_BYTES - len(BODY)))),
}


@pytest.mark.parametrize("byte_by_byte", [False, True], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["Content-Length", "chunks"])
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_bodies(server, vector, name, is_chunked, byte_by_byte):
    coding, body = COMPRESSED[name]
    framing = (TE,) if is_chunked else ()
    data = post(b"Content-Encoding: " + coding, *framing, body=chunks(body, 100) if is_chunked else body)
    with Client(server) as client:
        client.send(data + post(), byte_by_byte=byte_by_byte and len(data) < 3000)
        assert [client.answer().vector, client.answer().vector] == [vector, vector]


REFUSED_BODIES = {
    "br": (b"br", BODY, 415),
    "compress": (b"compress", BODY, 415),
    "twice": (b"gzip, gzip", gzip.compress(gzip.compress(BODY)), 415),
    "not gzip": (b"gzip", BODY, 400),
    "not zstd": (b"zstd", BODY, 400),
    "empty": (b"gzip", b"", 400),
    "half": (b"gzip", gzip.compress(BODY)[:-9], 400),
    "without its checksum": (b"gzip", gzip.compress(BODY)[:-8], 400),
    "another checksum": (b"gzip", gzip.compress(BODY)[:-8] + bytes(8), 400),
    "something behind": (b"gzip", gzip.compress(BODY) + b"garbage", 400),
    "something behind zstd": (b"zstd", zstd.compress(BODY) + b"garbage", 400),
    "no JSON": (b"gzip", gzip.compress(b"hello"), 400),
    "over the limit": (b"gzip", gzip.compress(BODY + b" " * (MAX_BODY_BYTES - len(BODY) + 1)), 413),
    "over the limit, zstd": (b"zstd", zstd.compress(BODY + b" " * (MAX_BODY_BYTES - len(BODY) + 1)), 413),
}


@pytest.mark.parametrize("name", REFUSED_BODIES)
def test_compressed_bodies_that_are_refused(server, name):
    coding, body, status = REFUSED_BODIES[name]
    with Client(server) as client:
        client.send(post(b"Content-Encoding: " + coding, body=body))
        answer = client.answer()
        assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
        if status == 415:
            assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
            assert answer.headers["connection"] == "close"
        else:
            assert status == 400 or str(MAX_BODY_BYTES) in str(answer.error["message"])
            client.send(post())
            assert client.answer().status == 200


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

ASKED = "authorization,content-type,x-stainless-lang,x-stainless-retry-count,dangerously-allow-browser"


def origin(name: str) -> bytes:
    return f"Origin: {name}".encode()


def cors_of(answer: Answer) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("name", [PAGE, "app://obsidian.md"])
@pytest.mark.parametrize("path", [b"/v1/embeddings", b"//embeddings/", b"/nothing"])
def test_a_preflight(server, name, path):
    with Client(server) as client:
        client.send(
            head(
                b"OPTIONS %b HTTP/1.1" % path,
                origin(name),
                b"Access-Control-Request-Method: POST",
                b"Access-Control-Request-Headers: " + ASKED.encode(),
                b"Access-Control-Request-Private-Network: true",
            )
        )
        answer = client.answer()
        assert answer.status == 204
        assert cors_of(answer) == {
            "access-control-allow-origin": name,
            "access-control-allow-methods": "GET, HEAD, POST, OPTIONS",
            "access-control-allow-headers": ASKED,
            "access-control-max-age": "7200",
            "access-control-allow-private-network": "true",
        }
        client.send(post(origin(name)))
        assert client.answer().status == 200


@pytest.mark.parametrize("name", ["https://other.example", "null", "https://page.example.evil", ""])
def test_other_origins_are_allowed_nothing(server, name):
    asked = head(b"OPTIONS /v1/embeddings HTTP/1.1", origin(name), b"Access-Control-Request-Method: POST")
    for data in (asked, post(origin(name)), post(origin(name), path="/nothing")):
        answer = exchange(server, data)
        assert cors_of(answer) == {}
        assert answer.headers["vary"] == "origin"


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


def test_a_page_of_any_origin_may_ask_without_a_key_what_it_may_send_but_no_more(guarded):
    asked = head(b"OPTIONS /v1/embeddings HTTP/1.1", origin(PAGE), b"Access-Control-Request-Method: POST")
    assert exchange(guarded, asked).status == 204
    for data, status in (
        (post(origin(PAGE)), 401),
        (post(origin(PAGE), b"Authorization: Bearer undefined"), 401),
        (post(origin(PAGE), b"Authorization: bearer " + KEY.encode()), 200),
        (post(origin("null"), b"x-api-key: " + KEY.encode()), 200),
        (head(b"POST /v1/embeddings HTTP/1.1", origin(PAGE), b"Expect: 100-continue", CL), 401),
        (b"garbage\r\n\r\n", 400),
    ):
        answer = exchange(guarded, data)
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "vary" not in answer.headers
        if status == 401:
            assert answer.error["code"] == "invalid_api_key"
            assert "Incorrect API key provided" in str(answer.error["message"])
    assert cors_of(exchange(guarded, post(b"api-key: " + KEY.encode()))) == {}, "no page asked"


def test_a_page_learns_that_too_much_is_asked_of_the_server(guarded):
    key = b"x-api-key: " + KEY.encode()
    [worker] = guarded.workers()
    stopped = [guarded._child("vecd.launch.child forkserver"), worker]  # or there would be another worker soon
    for process in stopped:
        process.suspend()
    try:
        with Client(guarded) as client:
            client.send(post(origin(PAGE), key, b"x-vecd-timeout-ms: 3000"))
            asked = head(b"GET /info HTTP/1.1", key)
            eventually(lambda: json.loads(exchange(guarded, asked).body)["queue"]["requests"] == 1)
            too_many = exchange(guarded, post(origin(PAGE), key))
            too_late = client.answer()
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):  # killed, because it takes too long
                process.resume()
    for answer, status in ((too_many, 429), (too_late, 503)):
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "retry-after" in answer.headers["access-control-expose-headers"]
        assert 1 <= int(answer.headers["retry-after"]) <= 60


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
        (),
        ("--http1.0",),
        ("--http1.1",),
        ("--http2",),
        ("--compressed",),
        ("--header", "Transfer-Encoding: chunked"),
        ("--header", "Transfer-Encoding: chunked", "--http2"),
        ("--header", "Expect: 100-continue"),
        ("--header", "Content-Type:"),
        ("--header", "Connection: close"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("data", [BODY, LARGE], ids=["small", "1.5 MB"])
def test_curl(server, vector, arguments, data):
    status, version, body = curl(server, *arguments, data=data)
    assert (status, version) == (200, "1.1")
    assert json.loads(body)["data"][0]["embedding"] == vector


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("framing", [(), ("--header", "Transfer-Encoding: chunked")], ids=["length", "chunked"])
def test_curl_sends_what_was_compressed(server, vector, coding, framing):
    compress: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "zstd": zstd.compress,
    }
    arguments = ("--header", f"Content-Encoding: {coding}", *framing)
    status, _, body = curl(server, *arguments, data=compress[coding](LARGE))
    assert status == 200
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
