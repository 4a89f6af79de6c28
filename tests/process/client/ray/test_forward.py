"""The pass-through of Ray Serve's replica, without Ray: before a server of the test, and before a real one."""

import asyncio
import os
import queue

import httpx
import psutil
import pytest

from tests.support.serving import clean_environment, eventually
from vecd.client.aio import AsyncClient
from vecd.client.exchanges import Piece
from vecd.client.ray.forward import HELD_BYTES, Forwarder
from vecd.client.ray.node_server import NodeServer

_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class FakeServer:
    """Answers each connection's requests with the next responses; None closes it. Keeps what it has received."""

    def __init__(self, path, responses) -> None:
        self.received: list[bytes] = []
        self.num_connections = 0
        self._path, self._responses = str(path), list(responses)

    async def __aenter__(self) -> "FakeServer":
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=1 << 24)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader, writer) -> None:
        self.num_connections += 1
        while self._responses:
            received = await reader.readuntil(b"\r\n\r\n")
            head = received.lower()
            if b"content-length: " in head:
                received += await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
            elif b"transfer-encoding: chunked" in head:
                received += await reader.readuntil(b"\r\n0\r\n\r\n")
            self.received.append(received)
            response = self._responses.pop(0)
            if response is None:
                break
            writer.write(response)
            if b"content-length" not in response and b"chunked" not in response:
                break
        writer.close()


def _client(path) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(Forwarder(str(path))), base_url="http://vecd", timeout=20)


async def test_headers_of_one_connection_are_not_passed_on(tmp_path):
    response = (
        b"HTTP/1.1 200 OK\r\nx-vecd-model: m\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\n"
        b"x-request-id: r\r\ndate: now\r\ncontent-length: 2\r\n\r\nok"
    )
    sent = {"connection": "close, x-mine", "x-mine": "1", "te": "trailers", "expect": "100-continue", "x-kept": "2"}
    async with FakeServer(tmp_path / "s", [response]) as server, _client(tmp_path / "s") as client:
        answer = await client.post("/v1/embeddings?a=b%20c", content=b"body", headers=sent)
    assert (answer.status_code, answer.content) == (200, b"ok")
    # Ray Serve writes the date and the request's id itself.
    assert dict(answer.headers) == {"x-vecd-model": "m", "content-length": "2"}
    [received] = server.received
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/embeddings?a=b%20c HTTP/1.1\r\n")
    assert body == b"body"
    names = {line.partition(b":")[0] for line in head.splitlines()[1:]}
    assert b"x-kept" in names
    assert not names & {b"connection", b"x-mine", b"te", b"expect"}


@pytest.mark.parametrize(
    "response",
    [
        None,
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab",  # and no more: the test's server closes behind the last one
        b"nonsense\r\n\r\n",
    ],
)
async def test_without_a_whole_response_the_proxy_gets_503_to_repeat_it(tmp_path, response):
    async with FakeServer(tmp_path / "s", [_OK, _OK, response]) as server, _client(tmp_path / "s") as client:
        for _ in range(2):
            assert (await client.get("/health")).status_code == 200
        answer = await client.post("/v1/embeddings", content=b"{}")
    assert server.num_connections == 1, "it serves one request after the other"
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "node_unavailable"
    async with _client(tmp_path / "none") as client:
        assert (await client.get("/health")).status_code == 503


async def test_a_connection_that_has_ended_is_not_used_again(tmp_path):
    async with FakeServer(tmp_path / "vecd", []) as server, _client(tmp_path / "vecd") as client:
        for number in (1, 2):
            server._responses.append(_OK)
            assert (await client.get("/")).text == "ok"  # the server closes behind its last response
            assert server.num_connections == number
            await asyncio.sleep(0.1)


async def test_a_large_body_is_passed_on_in_parts(tmp_path):
    parts = [bytes([number]) * 100_000 for number in range(12)]

    async def content():
        for part in parts:
            yield part

    async with FakeServer(tmp_path / "s", [_OK]) as server, _client(tmp_path / "s") as client:
        answer = await client.post("/v1/embeddings", content=content())
    assert answer.content == b"ok"
    chunked, found = server.received[0].partition(b"\r\n\r\n")[2], b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        found, chunked = found + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    assert found == b"".join(parts)


@pytest.mark.parametrize("size", [0, HELD_BYTES, HELD_BYTES + 1])
async def test_responses_of_any_size(tmp_path, size):
    body = os.urandom(size)
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + body
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (size, body)
    until_closed = b"HTTP/1.1 200 OK\r\n\r\n" + body
    async with (
        FakeServer(tmp_path / "s", [whole, *([chunked] if size else []), until_closed]),
        _client(tmp_path / "s") as client,
    ):
        for _ in range(3 if size else 2):
            assert (await client.get("/")).content == body


@pytest.fixture
def node_environment(tmp_path, monkeypatch):
    for name, value in clean_environment(tmp_path, {}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)


_FLAGS = ("--engine", "dummy", "--workers", "1")


async def test_before_vecd_itself(node_environment, tmp_path):
    server = NodeServer(None, _FLAGS)
    await asyncio.to_thread(server.serve)
    async with _client(server.path("public")) as client:
        answer = await client.post("/v1/embeddings", json={"input": [f"text {n}" for n in range(300)]})
        assert len(answer.json()["data"]) == 300
        assert (await client.get("/metrics")).status_code == 404  # on the admin socket alone
        head = await client.head("/health")
        assert (head.status_code, head.content) == (200, b"")
        assert (await client.get("/health")).json() == {"status": "ok", "model_files": "as loaded"}
    assert "totals" in await AsyncClient(f"unix:{server.path('admin')}").answer(Piece("/stats"))
    await asyncio.to_thread(server.stop)
    assert os.listdir(tmp_path / "tmp") == []


def test_the_death_of_vecd_is_told_once(node_environment, tmp_path, monkeypatch, capsys):
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(os, "_exit", codes.put)
    server = NodeServer(None, _FLAGS)
    server.serve()
    psutil.Process(server.pid).children()[0].kill()
    assert codes.get(timeout=20) == 70
    server.stop()
    assert codes.empty()
    assert "vecd has ended with 137: this actor ends, too" in capsys.readouterr().err
    eventually(lambda: os.listdir(tmp_path / "tmp") == [])


def test_what_cannot_start(node_environment):
    with pytest.raises(RuntimeError, match="ended with 2"):
        NodeServer(None, ["--no-such-flag"]).serve()
    for flag in ("--port", "--uds=/tmp/x"):
        with pytest.raises(ValueError, match="where the server of a node listens"):
            NodeServer(None, [flag])
