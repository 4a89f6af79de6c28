"""The tables of docs/troubleshooting.md: each row is provoked in a real server, which says what the row says it does.

Each scenario is one server, or one that does not start, and yields what it has provoked. All of them run at once,
because most of their time is waiting; the engine is the dummy, which fails on purpose (`tests.support.soak.injection`).
"""

import re
import shutil
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import psutil
import pytest

from tests.support.certificates import make_certificate
from tests.support.serving import (
    RunningServer,
    Server,
    clean_environment,
    eventually,
    running_server,
    vecd,
)
from tests.support.several_models import dummy_models, model_of
from tests.support.shared_servers import DUMMY
from tests.support.soak.faults import fork_servers, injecting, workers
from tests.support.soak.injection.sitecustomize import CRASH, NAN, RAISE, SLEEP, SPIN
from tests.support.task_limit import limited, task_cgroup
from vecd.gateway import errors

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
EMBEDDINGS = "/v1/embeddings"
TIMEOUT_S = 60
KEYS = {
    "embedder": 'scopes = ["embed"]\nmax_requests = 1',
    "metered": 'scopes = ["embed"]\ntokens_per_s = 0.001',
    "watcher": 'scopes = ["metrics"]',
    "all": "",
}
AUTH = {name: {"authorization": f"Bearer {name}-key-0123456789abcdef"} for name in KEYS}
# Without connections that are kept, because scenarios count them; made once, because that takes a tenth of a second.
HTTP = httpx.Client(
    timeout=TIMEOUT_S, verify=False, limits=httpx.Limits(max_keepalive_connections=0), headers=AUTH["all"]
)


class Row(NamedTuple):
    """A row of the page."""

    code: int
    """A status, or an exit code."""
    words: str
    """What the response says, or stderr; `…` stands for anything."""


class Seen(NamedTuple):
    code: int
    text: str


Provoked = Iterator[tuple[Row, Seen]]


def rows_of(page: str) -> list[Row]:
    """Those of all tables that begin with a status or an exit code: the code, and the first words that are quoted."""
    tables = re.findall(r"^\| (?:status|exit code) \|.*\n\| ---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [re.match(r"\| (\d+) \| `([^`]+)`", line) for table in tables for line in table.splitlines()]
    assert None not in cells, "a row without a code or without words"
    return [Row(int(cell[1]), cell[2]) for cell in cells if cell is not None]


# --- what scenarios do ------------------------------------------------------------------------------------------------


def ask(server: RunningServer, path: str, **options) -> Seen:
    method = options.pop("method", "POST" if options.keys() & {"json", "content"} else "GET")
    response = HTTP.request(method, server.url + path, **options)
    return Seen(response.status_code, response.text)


def embed(server: Server, value: object, **headers: str) -> Seen:
    """`headers`: with underscores."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return ask(server, EMBEDDINGS, json={"input": value}, headers=named)


def send(server: Server, raw: bytes) -> Seen:
    """Bytes, and what is sent back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(raw)
        return receive(sock)


def receive(sock: socket.socket) -> Seen:
    sock.settimeout(TIMEOUT_S)
    received = b""
    while piece := sock.recv(65536):
        received += piece
    return Seen(int(received.split()[1]), received.decode())


def ids(*numbers: int) -> list[list[int]]:
    """One input of the model's own token ids."""
    return [[101, *numbers, 102]]


def wait_until_ready(server: Server) -> None:
    eventually(lambda: ask(server, "/health").code == 200, TIMEOUT_S)


@contextmanager
def stopped_worker(server: Server) -> Iterator[None]:
    """What the worker gets meanwhile waits until the end."""
    wait_until_ready(server)
    [worker] = workers(server)
    worker.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            worker.resume()


def is_busy(url: str) -> bool:
    """Whether the worker has a batch. `url`: of the admin listener, if there is one."""
    [worker] = HTTP.get(f"{url}/info").json()["workers"]
    return bool(worker["state"] == "busy")


# --- servers that run -------------------------------------------------------------------------------------------------


def limits_keys_and_the_end(folder: Path) -> Provoked:
    file = folder / "keys.toml"
    entries = [
        f'[[keys]]\nname = "{name}"\nkey = "{AUTH[name]["authorization"].split()[1]}"\n{rest}\n'
        for name, rest in KEYS.items()
    ]
    file.touch(0o600)
    file.write_text("\n".join(entries))
    flags = [
        "--strict-model", "--token-ids", "reject", "--max-body-bytes", "700000", "--max-inputs", "100",
        "--max-request-tokens", "24000", "--max-connections", "30", "--max-connections-per-address", "20",
        "--max-requests", "9", "--keys-file", str(file), "--admin-port", "0", "--drain-grace", "1",
        "--drain-timeout", "2",
    ]  # fmt: skip
    with (
        running_server(*DUMMY, *flags) as server,
        ThreadPoolExecutor(16) as threads,
        ExitStack() as sockets,
    ):
        [admin] = re.findall(r"admin +(http:\S+)", server.stderr)
        slow = sockets.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        slow.sendall(b"GET / HTTP/1.1\r\n")
        yield from wrong_requests(server)
        yield from wrong_keys(server, admin)
        yield from too_many_at_once(server, threads)
        with stopped_worker(server):
            yield Row(503, "No answer before the request's deadline"), embed(server, "a", x_vecd_timeout_ms="300")
        with stopped_worker(server):
            yield Row(499, 'status="499"'), without_a_client(server, admin)
        yield Row(500, "Its log says more under the id of the request"), without_descriptors(server)
        yield from too_many_connections(server)
        yield Row(408, "not complete after"), receive(slow)
        eventually(lambda: ask(server, "/live").code == 200)
        with stopped_worker(server):
            last = threads.submit(embed, server, "a")
            eventually(lambda: is_busy(admin))
            server.process.send_signal(signal.SIGTERM)
            yield Row(503, "the server is shutting down"), health(server, "shutting down")
            seen = last.result()
        yield Row(503, "The server is shutting down and did not get to this request"), seen
        server.process.wait(TIMEOUT_S)


def wrong_requests(server: Server) -> Provoked:
    yield Row(404, "There is nothing at this path"), ask(server, "/v2/embeddings", json={})
    model = {"input": "a", "model": "another"}
    yield Row(404, "The model … does not exist; this server has"), ask(server, EMBEDDINGS, json=model)
    yield Row(405, "is not allowed on this path"), ask(server, EMBEDDINGS)
    other = embed(server, "a", if_vecd_identity="0" * 32)
    yield Row(412, "is demanded, and the model here is"), other
    yield Row(400, "The body is not valid JSON"), ask(server, EMBEDDINGS, content=b"{")
    dimensions = {"input": "a", "dimensions": 64}
    yield Row(400, "does not support specifying dimensions"), ask(server, EMBEDDINGS, json=dimensions)
    many = ["a"] * 101
    yield Row(400, "at most … in one request (--max-inputs)"), embed(server, many)
    yield Row(422, "at most … in one request (--max-inputs)"), ask(server, "/embed", json={"inputs": many})
    yield Row(400, "max … tokens per request"), embed(server, ["a " * 300] * 100)
    yield Row(413, "body: …, at most … are allowed"), embed(server, "a" * 700_000)
    coding = {"content-encoding": "compress"}
    yield Row(415, "header Content-Encoding"), ask(server, EMBEDDINGS, content=b"{}", headers=coding)
    yield Row(431, "longer than the … bytes allowed"), ask(server, "/live", headers={"cookie": "a" * 40_000})
    yield Row(501, "not supported"), send(server, b"BREW / HTTP/1.1\r\nhost: a\r\n\r\n")
    yield Row(505, "only 1.1 and 1.0 are supported"), send(server, b"GET / HTTP/2.0\r\nhost: a\r\n\r\n")
    rank = {"query": "a", "texts": ["b"]}
    yield Row(424, "This model can … it cannot"), ask(server, "/rerank", json=rank)
    yield Row(400, "is a list of token ids"), embed(server, ids(2000))
    too_many = {"input": ["a " * 300] * 90, "task": "token_embed"}
    words = "one vector for each token is given of at most … in a request"
    yield Row(400, words), ask(server, "/pooling", json=too_many)


def wrong_keys(server: Server, admin: str) -> Provoked:
    without = httpx.post(server.url + EMBEDDINGS, json={"input": "a"}, timeout=TIMEOUT_S)
    yield Row(401, "you didn't provide an API key"), Seen(without.status_code, without.text)
    yield Row(401, "Incorrect API key provided"), embed(server, "a", authorization="Bearer none-0123456789")
    yield Row(403, "does not have the scope"), embed(server, "a", **AUTH["watcher"])
    yield Row(404, "There is nothing at this path"), ask(server, "/metrics", headers=AUTH["watcher"])
    unknown = HTTP.post(f"{admin}/admin/models/nowhere/load")
    yield Row(404, "No model of the configuration has this name"), Seen(unknown.status_code, unknown.text)
    for header, words in (
        ({"origin": "http://a"}, "the admin listener answers no requests of web pages"),
        ({"host": "a.example"}, "on a loopback address the admin listener answers to localhost"),
    ):
        page = HTTP.get(f"{admin}/stats", headers={**header, **AUTH["watcher"]})
        yield Row(403, words), Seen(page.status_code, page.text)
    embed(server, "a " * 200, **AUTH["metered"])
    yield Row(429, "this API key may send … tokens a second"), embed(server, "a", **AUTH["metered"])


def too_many_at_once(server: Server, threads: ThreadPoolExecutor) -> Provoked:
    texts = ["東" * 200_000]
    all_seen = list(threads.map(lambda _: ask(server, "/tokenize", json={"inputs": texts}), range(4)))
    yield Row(429, "are with the tokenizer"), one_of(all_seen, 429)
    patient = {"x_vecd_timeout_ms": "60000"}
    many = {"inputs": ["a " * 300] * 80}
    for words, num, provoke in (
        (
            "One vector for each token",
            3,
            partial(ask, server, "/embed_all", json=many, headers={"x-vecd-timeout-ms": "60000"}),
        ),
        (
            "this key already has … in progress; its limit is",
            2,
            partial(embed, server, "a", **AUTH["embedder"], **patient),
        ),
        ("of them are yours: room is left for other callers", 9, partial(embed, server, "a", **patient)),
    ):
        with stopped_worker(server):
            waiting = [threads.submit(provoke) for _ in range(num)]
            refused = next(as_completed(waiting)).result()  # the first to be answered: the others wait for the worker
        yield Row(429, words), refused
        wait(waiting)


def one_of(all_seen: Sequence[Seen], code: int) -> Seen:
    """The first with a code, or any."""
    return next((seen for seen in all_seen if seen.code == code), all_seen[0])


def without_a_client(server: Server, admin: str) -> Seen:
    """The line of the metrics that counts a request whose client closes the connection first."""
    body = b'{"input": "a"}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as sock:
        key = AUTH["all"]["authorization"]
        head = f"POST {EMBEDDINGS} HTTP/1.1\r\nhost: a\r\nauthorization: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        eventually(lambda: is_busy(admin))
    counted = re.compile(r'^vecd_requests_total{.*status="(499)".*} 1.0$', re.MULTILINE)
    eventually(lambda: counted.search(HTTP.get(f"{admin}/metrics").text) is not None)
    found = counted.search(HTTP.get(f"{admin}/metrics").text)
    assert found is not None
    return Seen(int(found[1]), found[0])


def without_descriptors(server: Server) -> Seen:
    """What the gateway says to a request for which it cannot open a file, as its code does not expect."""
    gateway = server.gateway()
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        client.get("/live")
        limits = gateway.rlimit(psutil.RLIMIT_NOFILE)
        gateway.rlimit(psutil.RLIMIT_NOFILE, (1, limits[1]))
        try:
            response = client.get("/docs")
        finally:
            gateway.rlimit(psutil.RLIMIT_NOFILE, limits)
    return Seen(response.status_code, response.text)


def too_many_connections(server: Server) -> Provoked:
    """Twenty of one address and ten of another; both are this machine."""
    with ExitStack() as sockets:

        def connect(address: str) -> socket.socket:
            target = ("127.0.0.1", server.port)
            return sockets.enter_context(socket.create_connection(target, source_address=(address, 0)))

        def refused(address: str) -> Seen:
            sock = connect(address)
            sock.sendall(b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n")
            return receive(sock)

        for _ in range(20):  # one more is the slow one
            connect("127.0.0.1")
        yield Row(503, "Too many connections from one address"), refused("127.0.0.1")
        for _ in range(10):
            connect("127.0.0.2")
        yield Row(503, "Too many connections: … are open"), refused("127.0.0.3")


def a_multi_vector_model(minilm_folder: Path, folder: Path) -> Provoked:
    queries = ["one two three four five six seven eight nine ten " * 3] * 1500
    server = model_of(dummy_models(minilm_folder), "m3")
    wrong = ask(server, "/score", json={"queries": queries, "documents": queries})
    yield Row(400, "The queries have … tokens or more"), wrong


def a_slow_worker_behind_tls(folder: Path) -> Provoked:
    """Whose speed the gateway knows, and then faults of the engine, which need no other flags."""
    certificate = make_certificate(folder)
    switch, ranges = folder / "on", folder / "ranges.npy"
    np.save(ranges, np.array([[-1.0] * 384, [1.0] * 384]))
    flags = ("--max-requests", "2", "--max-wait", "5", "--batch-timeout", "30", "--quantization-ranges", str(ranges))
    tls = ("--tls-cert", certificate.cert, "--tls-key", certificate.key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", certificate.cert)
        with running_server(*DUMMY, *flags, *tls, env=injecting(switch)) as server, ThreadPoolExecutor(4) as threads:
            refused = HTTP.get(server.url.replace("https", "http") + "/live")
            yield Row(400, "This port speaks HTTPS"), Seen(refused.status_code, refused.text)
            switch.touch()
            for _ in range(4):  # it takes some to be believed
                embed(server, ids(SLEEP, *[2000] * 60))
            num_texts = 20 * server.info()["workers"][0]["tokens_per_s"] // 200
            texts = [f"{n} " + "a " * 200 for n in range(num_texts)]
            with stopped_worker(server):
                threads.submit(embed, server, texts, x_vecd_timeout_ms="3000")
                eventually(lambda: is_busy(server.url))
                words = "the wait would be about … s, at most … s are allowed"
                yield Row(429, words), embed(server, texts)
                words = "too long for a deadline that is … s away"
                yield Row(429, words), embed(server, "a", x_vecd_timeout_ms="1000")
            with stopped_worker(server):
                running = [threads.submit(embed, server, "a", x_vecd_timeout_ms="1500") for _ in range(3)]
                all_seen = [future.result() for future in running]
            yield Row(429, "being served, at most … may be at a time"), one_of(all_seen, 429)
            yield Row(500, "The engine failed on 'input["), embed(server, ids(RAISE))
            yield Row(500, "a vector that is not finite for 'input["), embed(server, ids(NAN))
            yield Row(424, "'inputs[0]'"), ask(server, "/embed", json={"inputs": ids(RAISE)})
            yield Row(500, "ended its worker each time it ran"), embed(server, ids(CRASH))
            ranges.touch()
            words = "Workers keep dying, and the model's files are not as loaded"
            yield Row(503, words), embed(server, ids(CRASH, 2000))


# --- workers that do not stay alive -----------------------------------------------------------------------------------


def workers_that_do_not_load_and_then_die(folder: Path) -> Provoked:
    # Each sequence is a batch of its own, and four of them are all that may be lost.
    flags = ("--load", "demand", "--start-timeout", "5", "--max-batch-tokens", "64", "--batch-timeout", "2")
    with (
        running_server(*DUMMY, *flags, env=hanging_start(folder)) as server,
        ThreadPoolExecutor(2) as threads,
    ):
        words = "The model is being loaded, which is expected to take"
        yield Row(503, words), embed(server, "a", x_vecd_timeout_ms="700")
        words = "The model was not loaded before the request's deadline"
        yield Row(503, words), embed(server, "a", x_vecd_timeout_ms="3500")
        yield Row(503, "The model could not be loaded"), embed(server, "a")
        yield Row(503, "the model could not be loaded"), ask(server, "/health")
        shutil.rmtree(folder / "on.starts")
        eventually(lambda: embed(server, "a").code == 200, TIMEOUT_S)
        (folder / "on").touch()
        with stopped_worker(server):
            waiting = threads.submit(embed, server, "a")
            yield Row(503, "is stuck"), health(server, "is stuck")
        assert waiting.result().code == 200
        many = threads.submit(embed, server, [ids(SPIN, *[2000 + n] * 250)[0] for n in range(12)])
        while not many.done():
            kill_workers(server)
            time.sleep(0.3)
        yield Row(503, "Workers keep dying"), many.result()
        wait_until_ready(server)
        [fork_server] = fork_servers(server)
        fork_server.suspend()
        kill_workers(server)
        yield Row(503, "worker … was killed"), health(server, "was killed")
        fork_server.resume()
        wait_until_ready(server)
        seen = Seen(200, "")
        deadline = time.monotonic() + TIMEOUT_S
        while "dies again" not in seen.text and time.monotonic() < deadline:
            kill_workers(server)
            time.sleep(0.01)
            seen = ask(server, "/health")
        yield Row(503, "dies again and again"), seen
        yield Row(503, "The model cannot be served"), embed(server, "a")


def kill_workers(server: Server) -> None:
    for worker in workers(server):
        with suppress(psutil.NoSuchProcess):
            worker.kill()


def health(server: Server, words: str) -> Seen:
    """What /health says as soon as it says these words."""
    seen = ask(server, "/health")

    def says_so() -> bool:
        nonlocal seen
        seen = ask(server, "/health")
        return words in seen.text

    eventually(says_so, TIMEOUT_S)
    return seen


# --- the start --------------------------------------------------------------------------------------------------------

NO_TASKS = Row(3, "no more threads or processes can be started")


def starts(folder: Path) -> Provoked:
    def start(*flags: str, within: Sequence[str] = (), **env: str) -> Seen:
        environment = clean_environment(folder, {"HF_HOME": str(folder), **env})
        done = subprocess.run(
            [*within, *vecd("--port", "0", *flags)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Seen(done.returncode, done.stderr)

    (folder / "tmp").mkdir()
    yield Row(2, "vecd: --…: must be"), start("--workers", "none")
    yield Row(2, "there is no such setting"), start(VECD_WORKRES="1")
    yield Row(2, "is not a proxy"), start("--trusted-proxies", "10.0.0.1,proxy.local")
    yield Row(2, "the model takes at most"), start("--max-tokens", "100000")
    yield Row(3, "no such folder"), start("./nowhere")
    yield Row(3, "and the hub cannot be reached"), start("org/name")
    (folder / "model").mkdir()
    yield Row(3, "file missing"), start("./model")
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield Row(3, "Address already in use"), start("--port", str(other.getsockname()[1]))
    with task_cgroup() as cgroup:
        if cgroup is not None:
            yield NO_TASKS, start(*DUMMY, within=limited(cgroup, 12))
    yield Row(3, "was still … after"), start(*DUMMY, "--start-timeout", "1", **hanging_start(folder))


def hanging_start(folder: Path) -> dict[str, str]:
    """The environment of a server whose workers never have an engine."""
    (folder / "on.starts" / "first").mkdir(parents=True, exist_ok=True)
    return injecting(folder / "on")


def a_start_that_lasts(folder: Path) -> Provoked:
    """What a probe and a request get while the workers never get ready: of one model, and of several."""
    (folder / "vecd.toml").write_text("[models.a]\n[models.b]\n")
    loading, refused = seen_while_loading(folder)
    yield Row(503, "workers are loading"), loading
    yield Row(503, "The server is starting"), refused
    _, refused = seen_while_loading(folder, "--config", "vecd.toml")
    yield Row(503, "The server is starting; models are loading"), refused


def seen_while_loading(folder: Path, *flags: str) -> tuple[Seen, Seen]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    environment = clean_environment(folder, hanging_start(folder))
    (folder / "tmp").mkdir(exist_ok=True)
    with subprocess.Popen(
        vecd(*DUMMY, "--port", str(port), *flags), env=environment, cwd=folder, stderr=subprocess.DEVNULL
    ) as process:
        all_seen: list[Seen] = []

        def is_loading() -> bool:
            with suppress(httpx.TransportError):
                response = HTTP.get(f"http://127.0.0.1:{port}/health")
                all_seen.append(Seen(response.status_code, response.text))
            return bool(all_seen) and "workers" in all_seen[-1].text  # before, it says that it reads the model

        try:
            eventually(is_loading, TIMEOUT_S)
            refused = HTTP.post(f"http://127.0.0.1:{port}/v1/embeddings", json={"input": "text"})
        finally:
            process.terminate()
    return all_seen[-1], Seen(refused.status_code, refused.text)


# --- the tests --------------------------------------------------------------------------------------------------------

SCENARIOS: tuple[Callable[[Path], Provoked], ...] = (
    limits_keys_and_the_end,
    a_slow_worker_behind_tls,
    workers_that_do_not_load_and_then_die,
    starts,
    a_start_that_lasts,
)
ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def provoked(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> list[tuple[Row, Seen]]:
    """By all scenarios. One that fails leaves the others' rows to be looked at, and its own unprovoked."""
    found: list[tuple[Row, Seen]] = []
    scenarios = [*SCENARIOS, partial(a_multi_vector_model, minilm_folder)]
    folders = [tmp_path_factory.mktemp("scenario") for _ in scenarios]

    def run(scenario: Callable[[Path], Provoked], folder: Path) -> None:
        try:
            found.extend(scenario(folder))
        except Exception:
            traceback.print_exc()

    with ThreadPoolExecutor(len(scenarios)) as threads:
        list(threads.map(run, scenarios, folders))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.code} {row.words}")
def test_a_row_says_what_the_server_says(row: Row, provoked: list[tuple[Row, Seen]]):
    pattern = re.compile(".*".join(re.escape(words) for words in row.words.split("…")))
    all_seen = [seen for provoked_row, seen in provoked if provoked_row == row]
    if row == NO_TASKS and not all_seen:
        pytest.skip("no cgroup with a limit on tasks can be made here")
    assert all_seen, "nothing provokes it"
    for seen in all_seen:
        assert seen.code == row.code, seen
        assert pattern.search(seen.text), seen


def test_what_is_provoked_has_a_row(provoked: list[tuple[Row, Seen]]):
    assert {row for row, _ in provoked} <= set(ROWS)
    assert len(set(ROWS)) == len(ROWS)


def test_each_status_of_an_error_has_a_row():
    def all_of(family: type[errors.ApiError]) -> Iterator[type[errors.ApiError]]:
        yield family
        for error in family.__subclasses__():
            yield from all_of(error)

    assert {error.status for error in all_of(errors.ApiError)} <= {row.code for row in ROWS}
