"""`vecd.Client` and `vecd.AsyncClient` against a real server with the dummy engine, and a socket that fails as told."""

import asyncio
import gc
import multiprocessing
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import vecd
from tests.support.bulk_server import BulkServer, vector_of
from tests.support.certificates import make_certificate
from tests.support.http_stub import Answer, StubServer

TEXTS = [f"text {index}" for index in range(3000)]


@pytest.fixture(scope="module")
def server() -> Iterator[vecd.Server]:
    with vecd.Server(engine="dummy", workers=1) as server:
        yield server


@pytest.fixture
def client(server: vecd.Server) -> Iterator[vecd.Client]:
    with vecd.Client(server.url, timeout=60) as client:
        yield client


def test_vectors_have_the_order_of_their_texts(client):
    matrix = client.embed(TEXTS)
    assert (matrix.shape, matrix.dtype.name, matrix.flags.writeable) == ((3000, 384), "float32", False)
    assert len(np.unique(matrix, axis=0)) == len(TEXTS)
    for index in (0, 511, 512, 1700, 2999):  # the limits of requests among them
        assert (client.embed(TEXTS[index]) == matrix[index : index + 1]).all()


def test_coroutines_get_the_same(client):
    async def embed_twice() -> list[np.ndarray]:
        async with vecd.AsyncClient(client.url, timeout=60) as other:
            return await asyncio.gather(other.embed(TEXTS), other.encode(TEXTS[:2]))

    large, small = asyncio.run(embed_twice())
    expected = client.embed(TEXTS)
    assert (large == expected).all()
    assert (small == expected[:2]).all()


def test_an_async_client_may_be_used_in_several_loops(client):
    """One after the other, and at the same time in threads; closed in another one, too."""
    other, expected = vecd.AsyncClient(client.url, timeout=60), client.embed("a")
    for _ in range(2):
        assert (asyncio.run(other.embed("a")) == expected).all()
    asyncio.run(other.close())
    with asyncio.Runner() as first, ThreadPoolExecutor(1) as thread, asyncio.Runner() as second:
        for _ in range(2):
            assert (first.run(other.embed("a")) == expected).all()
            assert (thread.submit(second.run, other.embed("a")).result() == expected).all()
        first.run(other.close())
        assert (thread.submit(second.run, other.embed("a")).result() == expected).all()
        thread.submit(second.run, other.close()).result()


def test_threads_may_share_a_client(client):
    expected = client.embed(TEXTS[:200])
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(client.embed, TEXTS[:200]))
    assert (np.concatenate(found) == expected).all()


def test_processes_may_share_a_client(client):
    expected = client.embed(TEXTS[:20])
    with multiprocessing.get_context("fork").Pool(2) as forked:
        assert (np.concatenate(forked.map(client.embed, TEXTS[:20])) == expected).all()  # pickled, as well
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, b"%d" % (client.embed(TEXTS[:20]) == expected).all())
        finally:
            os._exit(0)
    assert (client.embed(TEXTS[:20]) == expected).all()
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)


def test_kinds_of_inputs(client):
    ids = [token.id for token in client.tokenize("hello world")[0]]
    expected = client.embed("hello world")
    for inputs in (ids, [ids], np.array(ids), [np.array(ids, np.int32)], ("hello world",), iter(["hello world"])):
        assert (client.embed(inputs) == expected).all()
    assert client.embed([]).shape == (0, 384)
    for wrong in (b"bytes", 3, None, {"a": 1}):
        with pytest.raises(TypeError, match="texts"):
            client.embed(wrong)


def test_types_of_elements(client):
    float32 = client.embed(TEXTS[:9])
    assert np.allclose(client.embed(TEXTS[:9], dtype="float16"), float32, atol=1e-3)
    assert (client.embed(TEXTS[:9], dtype="ubinary") == np.packbits(float32 > 0, axis=1)).all()
    for dtype, kind, width in (("int8", "int8", 384), ("uint8", "uint8", 384), ("binary", "int8", 48)):
        matrix = client.embed(TEXTS[:9], dtype=dtype)
        assert (matrix.dtype, matrix.shape) == (np.dtype(kind), (9, width))
    assert client.embed([], dtype="binary").shape == (0, 48)
    with pytest.raises(ValueError, match="bfloat16"):
        client.embed("a", dtype="bfloat16")


def test_encode_takes_the_arguments_of_sentence_transformers(client):
    import torch

    expected = client.embed(TEXTS[:3])
    found = client.encode(TEXTS[:3], batch_size=2, show_progress_bar=True, device="cpu", normalize_embeddings=True)
    assert np.allclose(found, expected, atol=1e-6)
    assert found.flags.writeable
    assert client.encode("a").shape == (384,)
    assert torch.equal(client.encode(TEXTS[:3], convert_to_tensor=True), torch.tensor(expected))
    assert [row.shape for row in client.encode(TEXTS[:3], convert_to_numpy=False)] == [(384,)] * 3
    assert (client.encode_query(TEXTS[:3], prompt="") == expected).all()
    assert (client.encode_document(TEXTS[:3]) == expected).all()
    with pytest.raises(ValueError, match="output_value"):
        client.encode("a", output_value="token_embeddings")
    with pytest.raises(ValueError, match="pool"):
        client.encode("a", pool={})
    with pytest.raises(TypeError, match="bogus"):
        client.encode_query("a", bogus=1)
    assert np.allclose(client.similarity(expected, expected * 2).diagonal(), 1)


def test_errors_have_the_servers_words(client):
    with pytest.raises(vecd.BadRequest, match="384") as raised:
        client.embed("a", dimensions=7)
    assert (raised.value.status, raised.value.param) == (400, "dimensions")
    assert raised.value.request_id
    with pytest.raises(vecd.BadRequest, match="rerank"):
        client.rerank("a", ["b"])
    with pytest.raises(vecd.BadRequest, match=r"'input\[476\]'.*\(inputs 1024 to 1500 of the call"):
        client.embed([*TEXTS[:1500], "\ud800"])
    with pytest.raises(vecd.BadRequest, match=r"'input\[476\]'"):
        asyncio.run(vecd.AsyncClient(client.url).embed([*TEXTS[:1500], "\ud800"]))


def test_limits_of_the_server_are_kept():
    with vecd.Server(engine="dummy", workers=1, max_inputs=3, api_key="k") as server:
        assert len(np.unique(server.embed(TEXTS[:10]), axis=0)) == 10
        with pytest.raises(vecd.AuthenticationError):
            vecd.Client(server.url).embed("a")
        assert vecd.Client(server.url, api_key="k").embed("a").shape == (1, 384)


def test_a_matrix_is_received_where_it_stays(client):
    expected = client.embed(TEXTS)
    tracemalloc.start()
    try:
        matrix = client.embed(TEXTS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (matrix == expected).all()
    assert peak < 1.3 * matrix.nbytes  # the texts are in it, too


def test_a_matrix_goes_with_its_last_reference(client):
    async def embed() -> Any:
        async with vecd.AsyncClient(client.url) as other:
            return await other.embed(TEXTS[:3])

    gc.disable()
    try:
        for make in (lambda: client.embed(TEXTS[:3]), lambda: asyncio.run(embed())):
            kept = weakref.ref(make())
            assert kept() is None
    finally:
        gc.enable()


def test_numpy_and_torch_are_not_loaded_for_a_client():
    program = (
        "import sys, vecd\n"
        "assert not [name for name in sys.modules if name.startswith('vecd.')], 'something was imported at once'\n"
        "vecd.Client(), vecd.AsyncClient(), vecd.Server()\n"
        "assert not {'numpy', 'torch', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "assert set(vecd.__all__) <= set(dir(vecd)) and all(getattr(vecd, name) for name in vecd.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_identity_of_a_server_is_demanded(client):
    own = client.info()["model"]["identity"]
    client.embed("a")
    assert client.identity == own
    for demand in (own, own.partition(";")[0], "first"):
        one = vecd.Client(client.url, identity=demand)
        for _ in range(2):
            assert one.embed(TEXTS[:600]).shape == (600, 384)
        assert (one.identity, one.demanded_identity) == (own, own if demand == "first" else demand)
    for other in ("0" * 32, own.replace("float32", "int8")):
        with pytest.raises(vecd.IdentityMismatch, match=other) as raised:
            vecd.Client(client.url, identity=other).embed("a")
        assert raised.value.status == 412  # the server refuses it: nothing is computed


# --- failures -------------------------------------------------------------------------------------------------


class FailingServer:
    """Treats each connection as the next of `plan` says; the last one for ever."""

    def __init__(self, *plan: bytes | str) -> None:
        self.plan = list(plan)
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "FailingServer":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                what = self.plan[min(self.num_connections, len(self.plan) - 1)]
                self.num_connections += 1
                for _ in range(2 if what == "twice" else 1):
                    head = b""
                    while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
                        head += piece
                    if what == "reset":
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    elif what != "close":
                        connection.sendall(what if isinstance(what, bytes) else GOOD)


ROW = np.arange(4, dtype="<f4")
HEAD = b"HTTP/1.1 200 OK\r\nx-vecd-dimensions: 4\r\n"
GOOD = HEAD + b"content-length: 16\r\n\r\n" + ROW.tobytes()
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n10\r\n" + ROW.tobytes() + b"\r\n0\r\n\r\n"
TO_THE_END = HEAD + b"\r\n" + ROW.tobytes()
BUSY = b"HTTP/1.1 503 X\r\nretry-after-ms: 1\r\ncontent-length: 0\r\n\r\n"
CUT_OFF = GOOD[:-3]
PLANS = [
    ("reset", GOOD), ("close", GOOD), (CUT_OFF, GOOD), (BUSY, BUSY, GOOD), (b"nonsense\r\n\r\n", CHUNKED),
    (TO_THE_END,), (b"HTTP/1.1 502 X\r\n\r\n<html>", GOOD),
]  # fmt: skip


def embed_with_coroutines(url, num_calls=1, **options):
    async def embed_in_turn():
        async with vecd.AsyncClient(url, timeout=60, **options) as client:
            found = []
            for _ in range(num_calls):
                found.append(await client.embed("a"))
                await asyncio.sleep(0.01)  # what the server does with the connection is seen
            return found

    return asyncio.run(embed_in_turn())


def embed_blocking(url, num_calls=1, **options):
    with vecd.Client(url, timeout=60, **options) as client:
        return [client.embed("a") for _ in range(num_calls)]


both = pytest.mark.parametrize("embed", [embed_blocking, embed_with_coroutines])


@both
@pytest.mark.parametrize("plan", PLANS)
def test_a_failure_that_passes_is_not_seen(plan, embed):
    with FailingServer(*plan) as failing:
        assert (embed(failing.url)[0] == ROW).all()
        assert failing.num_connections == len(plan)


@both
def test_a_connection_that_stays_open_is_used_again(embed):
    with FailingServer("twice") as server:
        embed(server.url, 2)
        assert server.num_connections == 1


@both
def test_a_connection_that_was_closed_while_idle_is_made_anew_at_once(embed):
    with FailingServer(GOOD) as failing:
        assert (np.concatenate(embed(failing.url, 3, retry_for=0)) == ROW).all()
        assert failing.num_connections == 3


@pytest.mark.parametrize(
    ("answer", "call", "said"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", lambda c: c.embed("a"), "x-vecd-dimensions"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", lambda c: c.info(), "no JSON"),
        (GOOD.replace(b"dimensions: 4", b"dimensions: \xb2"), lambda c: c.embed("a"), "x-vecd-dimensions"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", lambda c: c.rerank("a", ["b"]), "no items"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", lambda c: c.sparse("a"), "no items"),
    ],
)
def test_an_answer_that_is_not_vecds_is_an_error(answer, call, said):
    with FailingServer(answer) as failing, pytest.raises(vecd.ServerError, match=said):
        call(vecd.Client(failing.url))


class SlowServer(StubServer):
    """Refuses a request with the text "bad", and does not answer others before `is_over`."""

    is_over = threading.Event()

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if b"bad" in body:
            return 400, b"no", {}
        if method == "POST":
            self.is_over.wait(60)
        return 200, b'{"limits":{"max_inputs":1}}', {}


@pytest.mark.parametrize(
    "embed",
    [
        lambda url: vecd.Client(url, timeout=10).embed(["slow", "bad", *["slow"] * 8]),
        lambda url: asyncio.run(vecd.AsyncClient(url, timeout=10).embed(["slow", "bad", *["slow"] * 8])),
    ],
    ids=["blocking", "coroutines"],
)
def test_an_error_of_a_later_request_ends_the_call(embed):
    with SlowServer() as server:
        server.is_over = threading.Event()
        try:
            with pytest.raises(vecd.BadRequest):
                embed(server.url)
        finally:
            server.is_over.set()


def test_two_models_are_never_mixed_in_a_matrix():
    info = b'{"limits":{"max_inputs":1}}'
    first = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(info) + info
    rows = [
        GOOD.replace(b"\r\n", b"\r\nx-vecd-identity: %s;dtype=float32\r\n" % (name * 32), 1) for name in (b"a", b"b")
    ]
    with FailingServer(first, *rows) as failing, pytest.raises(vecd.IdentityMismatch, match="two models"):
        vecd.Client(failing.url).embed(["a", "b"])
    with FailingServer(first, rows[0], GOOD) as failing, pytest.raises(vecd.IdentityMismatch, match="without an"):
        vecd.Client(failing.url, connections=1).embed(["a", "b"])
    with FailingServer(first, rows[0]) as failing:
        client = vecd.Client(failing.url)
        assert client.embed(["a", "b"]).shape == (2, 4)
        assert client.identity == "a" * 32 + ";dtype=float32"


def test_an_end_of_patience_has_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(vecd.ServerUnavailable, match="refused") as raised:
        vecd.Client(url, retry_for=0).embed("a")
    assert isinstance(raised.value, ConnectionError)
    with pytest.raises(vecd.Timeout) as too_long:
        vecd.Client(url, timeout=0.01).embed("a")
    assert isinstance(too_long.value, TimeoutError)
    with pytest.raises(vecd.Timeout):
        asyncio.run(vecd.AsyncClient(url, timeout=0.01).embed("a"))


def test_tls(tmp_path):
    certificate = make_certificate(tmp_path)
    with BulkServer(certificate=certificate) as server:
        expected = [vector_of(text, server.model)[: server.dim] for text in ("a", "b")]
        with vecd.Client(server.url, ca=certificate.cert) as client:
            assert np.allclose(client.embed(["a", "b"]), expected)
            assert pickle.loads(pickle.dumps(client)).embed("a").shape == (1, server.dim)
        with pytest.raises(vecd.ServerUnavailable, match="not trusted"):
            vecd.Client(server.url).embed("a")
        with pytest.raises(vecd.ServerUnavailable, match="not trusted"):
            asyncio.run(vecd.AsyncClient(server.url).embed("a"))
        assert asyncio.run(vecd.AsyncClient(server.url, ca=certificate.cert).embed("a")).shape == (1, server.dim)
    with BulkServer() as plain, pytest.raises(vecd.ServerUnavailable, match="does not speak TLS"):
        vecd.Client(plain.url.replace("http:", "https:")).embed("a")
