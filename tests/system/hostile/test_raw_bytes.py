"""What a server answers to bytes that no well-meaning client would send: one real server, raw sockets.

A vector is what is sent, the statuses that come back, and whether the connection is closed then. What is refused is
sent with a good request behind it, which must never be answered: an intermediary and this server would disagree about
where it begins. What the parser alone refuses is in tests/unit/gateway/http/test_http1.py: here is one of each kind,
and what that has not.
"""

import gzip
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import psutil
import pytest

from tests.support.serving import Server, running_server
from vecd.gateway.http.framing import zstd

TIMEOUT_S = 30.0
KEY = "a-key-for-tests"
MAX_BODY_BYTES = 1_000_000
BODY = b'{"input":"hi"}'

HOST = b"Host: x"
AUTH = b"Authorization: Bearer " + KEY.encode()
CL = b"Content-Length: %d" % len(BODY)
TE = b"Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
POST_LINE = b"POST /v1/embeddings HTTP/1.1"


def lines(*parts: bytes) -> bytes:
    return b"".join(part + b"\r\n" for part in parts) + b"\r\n"


def get(*headers: bytes, line: bytes = b"GET /live HTTP/1.1", host: bytes = HOST) -> bytes:
    return lines(line, host, *headers)


def post(*headers: bytes, body: bytes = b"", line: bytes = POST_LINE) -> bytes:
    return lines(line, HOST, AUTH, *headers) + body


def bytewise(body: bytes) -> bytes:
    """In chunks of a byte."""
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


def post_coded(coding: bytes, body: bytes) -> bytes:
    return post(b"Content-Encoding: " + coding, b"Content-Length: %d" % len(body), body=body)


GOOD = post(CL, body=BODY)


class Vector(NamedTuple):
    sent: bytes
    statuses: tuple[int, ...]
    is_closed: bool = False


def refused(sent: bytes, status: int = 400) -> Vector:
    return Vector(sent + get(), (status,), is_closed=True)


VECTORS: dict[str, Vector] = {
    # --- which body? ---
    "CL then TE": refused(post(CL, TE, body=CHUNKS)),
    "CL 0 and TE": refused(post(b"Content-Length: 0", TE, body=CHUNKS)),
    "CL and TE identity": refused(post(CL, b"Transfer-Encoding: identity", body=BODY)),
    "CL as a list": refused(post(b"Content-Length: 14, 14", body=BODY)),
    "CL minus zero": refused(post(b"Content-Length: -0")),
    "CL of 2^64": refused(post(b"Content-Length: 18446744073709551616")),
    "CL of 2^64 + 14": refused(post(b"Content-Length: 18446744073709551630", body=BODY)),
    "CL of 2^63": refused(post(b"Content-Length: 9223372036854775808"), 413),
    "CL with a vertical tab": refused(post(b"Content-Length: \x0b14", body=BODY)),
    "CL with an NBSP": refused(post(b"Content-Length: \xa014", body=BODY)),
    "CL with a NUL": refused(post(b"Content-Length: 14\0", body=BODY)),
    "TE chunked, chunked": refused(post(b"Transfer-Encoding: chunked, chunked", body=CHUNKS)),
    "TE identity, chunked": refused(post(b"Transfer-Encoding: identity, chunked", body=CHUNKS), 501),
    "TE chunked-x": refused(post(b"Transfer-Encoding: chunked-x", body=CHUNKS), 501),
    "TE in quotes": refused(post(b'Transfer-Encoding: "chunked"', body=CHUNKS), 501),
    "TE with a parameter": refused(post(b"Transfer-Encoding: chunked;q=1", body=CHUNKS), 501),
    "TE with an NEL": refused(post(b"Transfer-Encoding: chunked\x85", body=CHUNKS), 501),
    "TE with a NUL": refused(post(b"Transfer-Encoding: chunked\0", body=CHUNKS)),
    "TE with a space before the colon": refused(post(b"Transfer-Encoding : chunked", body=CHUNKS)),
    "TE with a bare CR": refused(post(b"Transfer-Encoding:\rchunked", body=CHUNKS)),
    "TE behind a bare LF": refused(post(b"A: b\nTransfer-Encoding: chunked", body=CHUNKS)),
    # --- chunks ---
    "chunk size with an underscore": refused(post(TE, body=b"0_e\r\n" + BODY + b"\r\n0\r\n\r\n")),
    "chunk size of 2^64 + 14": refused(post(TE, body=b"1000000000000000e\r\n" + BODY + b"\r\n0\r\n\r\n")),
    "chunk size of 2^64 - 1": refused(post(TE, body=b"ffffffffffffffff\r\n" + BODY), 413),
    "chunk extension with a bare CR": refused(post(TE, body=b"e;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n")),
    "chunk longer than its size": refused(post(TE, body=b"d\r\n" + BODY + b"\r\n0\r\n\r\n")),
    "chunk with CR X after it": refused(post(TE, body=b"e\r\n" + BODY + b"\rX0\r\n\r\n")),
    "last chunk and LF LF": refused(post(TE, body=b"0\n\n")),
    "trailer without a colon": refused(post(TE, body=CHUNKS[:-2] + b"abc\r\n\r\n")),
    "trailer folded": refused(post(TE, body=CHUNKS[:-2] + b"A: b\r\n c\r\n\r\n")),
    "trailer with a bare LF": refused(post(TE, body=CHUNKS[:-2] + b"A: b\n\r\n")),
    "trailers too long": refused(post(TE, body=CHUNKS[:-2] + b"A: " + b"b" * 33_000), 431),
    "chunk extension too long": refused(post(TE, body=b"e;a=" + b"b" * 33_000), 431),
    # --- heads ---
    "bare CR in a name": refused(get(b"A\rB: c")),
    "a name in parentheses": refused(get(b"A(b): c")),
    "a name beyond ASCII": refused(get(b"A\xe9: c")),
    "a control character in a value": refused(get(b"A: \x01")),
    "HTTP/01.1": refused(get(line=b"GET /live HTTP/01.1")),
    "HTTP/1,1": refused(get(line=b"GET /live HTTP/1,1")),
    "HTTP/ 1.1": refused(get(line=b"GET /live HTTP/ 1.1")),
    "HTTPS/1.1": refused(get(line=b"GET /live HTTPS/1.1")),
    "no method": refused(get(line=b" /live HTTP/1.1")),
    "no target": refused(get(line=b"GET HTTP/1.1")),
    "a byte beyond ASCII in the target": refused(get(line=b"GET /\xff HTTP/1.1")),
    "an escape that is none": refused(get(line=b"GET /%zz HTTP/1.1")),
    "an escaped NUL": refused(get(line=b"GET /%00 HTTP/1.1")),
    "an escaped line end": refused(get(line=b"GET /%0d%0aA:b HTTP/1.1")),
    "a target that is no path": refused(get(line=b"GET live HTTP/1.1")),
    "SSH": refused(b"SSH-2.0-OpenSSH_9.0\r\n"),
    # --- Host ---
    "Host twice, different": refused(get(b"Host: y")),
    **{
        f"Host {value!r}": refused(get(host=b"Host: " + value))
        for value in (b"a b", b"user@x", b"x?", b"[x]", b"x:\xb2")
    },
    **{
        f"absolute-form with {value!r}": refused(get(line=b"GET http://" + value + b"/live HTTP/1.1"))
        for value in (b"", b":80", b"user@x", b"a,b")
    },
    "absolute-form of another scheme": refused(get(line=b"GET ftp://x/live HTTP/1.1")),
    # --- what is too much ---
    "a body that is too long": refused(post(b"Content-Length: %d" % (MAX_BODY_BYTES + 1)), 413),
    "a chunk that is too long": refused(post(TE, body=b"%x\r\n" % (MAX_BODY_BYTES + 1)), 413),
    "a target at the limit": Vector(get(line=b"GET /" + b"a" * 8191 + b" HTTP/1.1"), (404,)),
    "a target over the limit": refused(get(line=b"GET /" + b"a" * 8192 + b" HTTP/1.1"), 431),
    "a head at the limit": Vector(get(b"A: " + b"b" * (32 * 1024 - len(get(b"A: ")))), (200,)),
    "a head over the limit": refused(get(b"A: " + b"b" * (32 * 1024 - len(get(b"A: ")) + 1)), 431),
    "100 headers": Vector(get(*[b"A: b"] * 99), (200,)),
    "101 headers": refused(get(*[b"A: b"] * 100), 431),
    "a body of codings in two headers": refused(
        post(CL, b"Content-Encoding: gzip", b"Content-Encoding: zstd", body=BODY), 415
    ),
    "a bomb": Vector(post_coded(b"gzip", gzip.compress(b" " * (MAX_BODY_BYTES + 1))), (413,)),
    "a bomb of zstd": Vector(post_coded(b"zstd", zstd.compress(b" " * 100_000_000)), (413,)),
    "a bomb that begins well": Vector(post_coded(b"gzip", gzip.compress(BODY + b" " * 100_000_000)), (413,)),
    "a frame that asks for 128 MiB": Vector(
        post_coded(b"zstd", b"\x28\xb5\x2f\xfd\x00\x88" + b"\x01\x00\x00"), (400,)
    ),
    "many empty members": Vector(post_coded(b"gzip", gzip.compress(b"") * 5000), (400,)),
    "blocks of nothing": Vector(post_coded(b"deflate", b"\x78\x9c" + b"\x00\x00\x00\xff\xff" * 100_000), (400,)),
    # --- odd, with one meaning only ---
    "a compressed body": Vector(post_coded(b"gzip", gzip.compress(BODY)), (200,)),
    "a compressed body in chunks": Vector(
        post(TE, b"Content-Encoding: gzip", body=bytewise(gzip.compress(BODY))), (200,)
    ),
    "a compressed request within a body": Vector(post_coded(b"zstd", zstd.compress(get())) + get(), (400, 200)),
    "a body that is not compressed": Vector(post_coded(b"gzip", BODY), (400,)),
    "a compressed body that breaks off": Vector(post_coded(b"gzip", gzip.compress(BODY)[:-1]), (400,)),
    "a request behind what was compressed, in the same body": Vector(
        post_coded(b"gzip", gzip.compress(BODY) + GOOD), (400,)
    ),
    "a good request": Vector(GOOD, (200,)),
    "chunks": Vector(post(TE, body=CHUNKS), (200,)),
    "chunks with extensions and trailers": Vector(
        post(TE, body=b'e;a=b;c="d"\r\n' + BODY + b"\r\n000;e\r\nAuthorization: x\r\nHost: y\r\n\r\n"), (200,)
    ),
    "chunks of a byte": Vector(post(TE, body=bytewise(BODY)), (200,)),
    "empty lines before": Vector(b"\r\n\r\n\n" + get(), (200,)),
    "HTTP/1.0": Vector(get(line=b"GET /live HTTP/1.0") + get(), (200,), is_closed=True),
    "HTTP/1.0 without Host": Vector(b"GET /live HTTP/1.0\r\n\r\n", (200,), is_closed=True),
    "HTTP/1.0 kept alive": Vector(get(b"Connection: keep-alive", line=b"GET /live HTTP/1.0"), (200,)),
    "Connection: close": Vector(get(b"Connection: close") + get(), (200,), is_closed=True),
    "GET with chunks": Vector(get(TE) + CHUNKS, (200,)),
    "HTTP/1.0 kept alive and closed": Vector(
        get(b"Connection: close, keep-alive", line=b"GET /live HTTP/1.0") + get(), (200,), is_closed=True
    ),
    "TE with a tab after it": Vector(post(b"Transfer-Encoding: chunked\t", body=CHUNKS), (200,)),
    "chunk extensions with whitespace": Vector(
        post(TE, body=b'e ;\ta = "b" ; c\r\n' + BODY + b"\r\n0 ; d\r\n\r\n"), (200,)
    ),
    "absolute-form": Vector(get(line=b"GET http://other:1/live HTTP/1.1"), (200,)),
    "OPTIONS *": Vector(get(line=b"OPTIONS * HTTP/1.1"), (204,)),
    "OPTIONS": Vector(get(line=b"OPTIONS /v1/embeddings HTTP/1.1"), (204,)),
    "OPTIONS with a body": Vector(get(CL, line=b"OPTIONS /v1/embeddings HTTP/1.1") + BODY, (204,)),
    "a preflight of a page that is not allowed": Vector(
        get(b"Origin: https://a", b"Access-Control-Request-Method: POST", line=b"OPTIONS /v1/embeddings HTTP/1.1"),
        (204,),
    ),
    "a path that repeats itself": Vector(get(line=b"GET " + b"/live" * 1000 + b" HTTP/1.1"), (404,)),
    "a path of slashes": Vector(get(line=b"GET " + b"/" * 8000 + b"live HTTP/1.1"), (200,)),
    "TRACE": Vector(get(line=b"TRACE /live HTTP/1.1"), (405,)),
    "DELETE": Vector(get(line=b"DELETE /live HTTP/1.1"), (405,)),
    "QUERY": Vector(get(line=b"QUERY /live HTTP/1.1"), (405,)),
    "a path with dots": Vector(get(line=b"GET /../../etc/passwd HTTP/1.1"), (404,)),
    "an escaped path": Vector(get(line=b"GET /%6cive HTTP/1.1"), (200,)),
    "an offer of h2c": Vector(
        post(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMA", CL, body=BODY), (200,)
    ),
    "an offer of WebSocket": Vector(get(b"Connection: Upgrade", b"Upgrade: websocket"), (200,)),
    "Expect": Vector(post(CL, b"Expect: 100-continue", body=BODY), (200,)),
    "an expectation that is unknown": Vector(post(CL, b"Expect: 200-ok", body=BODY), (200,)),
    "a body of NULs": Vector(post(b"Content-Length: 100", body=bytes(100)), (400,)),
    "no key": Vector(lines(POST_LINE, HOST, CL) + BODY, (401,)),
    "two keys": Vector(lines(POST_LINE, HOST, AUTH, AUTH, CL) + BODY, (401,)),
    # --- one behind the other ---
    "two good requests": Vector(GOOD + GOOD, (200, 200)),
    "ten good requests": Vector((GOOD + get() + post(TE, body=CHUNKS)) * 10, (200,) * 30),
    "a good request, a bad one, a good one": Vector(GOOD + get(b"A : b") + GOOD, (200, 400), is_closed=True),
    "a request within a body": Vector(post(b"Content-Length: %d" % len(get()), body=get()) + get(), (400, 200)),
    "a request within a chunk": Vector(
        post(TE, body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(get()), get())) + get(), (400, 200)
    ),
    "a body longer than its length": Vector(GOOD + b"extra\r\n\r\n" + GOOD, (200, 400), is_closed=True),
    "a bad Host in the second request": Vector(GOOD + get(host=b"Host: a b") + GOOD, (200, 400), is_closed=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--engine", "dummy", "--workers", "1", "--max-body-bytes", str(MAX_BODY_BYTES))
    with running_server(*flags, env={"VECD_API_KEY": KEY}) as running:
        yield running
        assert "Traceback" not in running.stderr
        assert KEY not in running.stderr
        for process in running.processes():
            assert KEY not in " ".join(process.cmdline())


@pytest.fixture(autouse=True)
def _still_answers(server: Server) -> Iterator[None]:
    yield
    with Client(server) as client:
        client.send(GOOD)
        assert client.status() == 200


REFUSED_BY_HEAD = {401, 404, 405}


class Client:
    def __init__(self, server: Server) -> None:
        self.sock = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def send(self, data: bytes, *, byte_by_byte: bool = False) -> None:
        with suppress(ConnectionError):  # it may have been refused before its end
            if byte_by_byte:
                for at in range(len(data)):
                    self.sock.sendall(data[at : at + 1])
            else:
                self.sock.sendall(data)

    def status(self, *, is_head: bool = False) -> int | None:
        """Of the next answer, which is read whole; None when the server has closed."""
        while b"\r\n\r\n" not in self._received:
            if not self._receive():
                assert not self._received, "the end within an answer"
                return None
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        match = re.match(rb"HTTP/1\.1 (\d{3}) [^\r\n]+\r\n", head + b"\r\n")
        assert match is not None, head
        if match[1] == b"100":
            return self.status(is_head=is_head)
        if match[1] == b"204":
            return 204
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        assert length is not None
        while not is_head and len(self._received) < int(length[1]):
            assert self._receive(), "the end within an answer"
        if not is_head:
            self._received = self._received[int(length[1]) :]
        return int(match[1])

    def _receive(self) -> bytes:
        data = self.sock.recv(65536)
        self._received += data
        return data


@pytest.mark.parametrize(
    ("name", "byte_by_byte"),
    [(name, False) for name in VECTORS] + [(name, True) for name in VECTORS if len(VECTORS[name].sent) < 5000],
)
def test_each_vector_has_its_answer(server, name, byte_by_byte):
    vector = VECTORS[name]
    with Client(server) as client:
        client.send(vector.sent, byte_by_byte=byte_by_byte)
        assert tuple(client.status() for _ in vector.statuses) == vector.statuses
        if vector.is_closed:
            assert client.status() is None
        else:
            client.send(get())
            # Refused by the head alone, if the server saw that before it saw the body, the client may not go on.
            may_end = byte_by_byte and vector.statuses[-1] in REFUSED_BY_HEAD
            assert client.status() in ((200, None) if may_end else (200,))


@pytest.mark.parametrize("name", ["a good request", "chunks with extensions and trailers", "an offer of h2c"])
def test_a_request_that_breaks_off_at_any_byte_is_no_request(server, name):
    sent = VECTORS[name].sent
    for at in range(1, len(sent)):
        with Client(server) as client:
            client.send(sent[:at])
            client.sock.shutdown(socket.SHUT_WR)
            assert client.status() is None, at


def test_a_client_may_leave_at_any_byte(server):
    for at in range(0, len(GOOD) + 1, 3):
        with Client(server) as client:
            client.send(GOOD[:at])


def test_head_has_no_body(server):
    with Client(server) as client:
        client.send(get(line=b"HEAD /live HTTP/1.1"))
        assert client.status(is_head=True) == 200
        client.send(get(line=b"HEAD /nothing HTTP/1.1"))
        assert client.status(is_head=True) == 404
        client.send(get())
        assert client.status() == 200


@pytest.mark.parametrize("headers", [[], [b"Authorization: Bearer wrong"]])
def test_who_has_no_key_is_not_asked_for_a_body(server, headers):
    with Client(server) as client:
        client.send(lines(POST_LINE, HOST, *headers, b"Expect: 100-continue", b"Content-Length: 100"))
        assert client.sock.recv(12) == b"HTTP/1.1 401"


def test_who_has_one_is(server):
    with Client(server) as client:
        client.send(post(CL, b"Expect: 100-continue"))
        assert client.sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(BODY)
        assert client.status() == 200


ENDLESS = {
    "a header of 100 MB": (b"GET /live HTTP/1.1\r\nHost: x\r\nA: ", b"a" * 100_000, 1000, 431),
    "500,000 headers": (b"GET /live HTTP/1.1\r\nHost: x\r\n", b"A: b\r\n" * 5000, 100, 431),
    "a request line of 100 MB": (b"GET /", b"a" * 100_000, 1000, 431),
    "a method of 100 MB": (b"", b"A" * 100_000, 1000, 501),
    "a chunk extension of 100 MB": (post(TE, body=b"1;a="), b"a" * 100_000, 1000, 431),
    "trailers of 100 MB": (post(TE, body=b"0\r\n"), b"A: b\r\n" * 10_000, 1700, 431),
    "chunks of a byte, 100 MB": (post(TE), b"1\r\nx\r\n" * 10_000, 1700, 400),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_cut_off_and_takes_no_memory(server, name):
    start, unit, num_units, status = ENDLESS[name]
    gateway: psutil.Process = server.gateway()
    before = gateway.memory_info().rss
    with Client(server) as client:
        client.send(start)
        with suppress(ConnectionError):
            for _ in range(num_units):
                client.sock.sendall(unit)
        with suppress(ConnectionError):  # who sends on for so long may never learn why
            assert client.status() in (status, None)
    assert gateway.memory_info().rss - before < 32 * 2**20


def test_empty_lines_for_ever_are_no_request_and_cost_nothing(server):
    with Client(server) as client:
        for _ in range(50):
            client.send(b"\r\n" * 50_000)
        client.send(get())
        assert client.status() == 200
