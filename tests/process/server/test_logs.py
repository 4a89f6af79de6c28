"""What a whole server writes down: lines and spans of real requests, and what becomes of lines that nobody reads."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.support.collector import Collector
from tests.support.serving import Server, clean_environment, eventually, running_server, vecd

PARENT_ID = "b7ad6b7169203331"
TEXT = "zzsecret"

CONFIG = 'engine = "dummy"\nworkers = 1\ntrace-ratio = 0\nlog-requests = 10\n'


@pytest.fixture(scope="module")
def collector():
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def config(tmp_path_factory, collector) -> Path:
    path = tmp_path_factory.mktemp("config") / "vecd.toml"
    path.write_text(f'{CONFIG}log-format = "json"\notlp-endpoint = "{collector.url}"\n')
    return path


@pytest.fixture(scope="module")
def server(config):
    with running_server("--config", str(config)) as running:
        yield running


def lines(server: Server) -> list[dict]:
    return [json.loads(line) for line in server.stderr.splitlines()]


def line_of(server: Server, request_id: str) -> dict:
    """Of a request, which was not one of too many."""

    def found() -> list[dict]:
        return [line for line in lines(server) if line.get("request_id") == request_id]

    eventually(lambda: bool(found()))
    [line] = found()
    return line


def ask(server: Server, trace_id: str = "", flags: str = "01", **headers: str) -> httpx.Response:
    if trace_id:
        headers["traceparent"] = f"00-{trace_id}-{PARENT_ID}-{flags}"
    body = {"input": [f"{TEXT} one", f"{TEXT} two"]}
    return httpx.post(f"{server.url}/v1/embeddings", json=body, headers=headers).raise_for_status()


def test_each_process_writes_json_and_nothing_else(server):
    [ready] = [line for line in lines(server) if line.get("event") == "ready"]
    assert (ready["url"], ready["pid"], ready["process"]) == (server.url, server.pid, "supervisor")
    assert (ready["workers"], ready["dimensions"], ready["engine"]) == (1, 384, "dummy")
    assert all({"time", "level", "process", "logger", "message"} <= line.keys() for line in lines(server))


def test_a_request_has_a_line_and_spans(server, collector):
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    answer = ask(server, trace_id, tracestate="vendor=1")
    line = line_of(server, answer.headers["x-request-id"])
    assert (line["route"], line["dialect"], line["status"], line["process"]) == (
        "/v1/embeddings", "openai", 200, "gateway",
    )  # fmt: skip
    assert (line["items"], line["tokens"], line["trace_id"]) == (2, answer.json()["usage"]["total_tokens"], trace_id)
    stages = [line[f"{name}_ms"] for name in ("parse", "tokenize", "queue", "compute", "encode")]
    assert min(stages) >= 0
    assert line["total_ms"] >= max(stages) > 0

    eventually(lambda: len(collector.trace(trace_id)) == 7)
    spans = {span.name: span for span in collector.trace(trace_id)}
    whole, compute, batch = spans["POST /v1/embeddings"], spans["compute"], spans["worker 0 batch"]
    assert (whole.parent_id, whole.state) == (PARENT_ID, "vendor=1")
    assert whole.attributes["vecd.request_id"] == answer.headers["x-request-id"]
    assert whole.attributes["server.port"] == server.port
    assert whole.attributes["gen_ai.usage.input_tokens"] == line["tokens"]
    assert {spans[name].parent_id for name in ("parse", "tokenize", "queue", "compute", "encode")} == {whole.span_id}
    assert all(whole.encloses(span) for span in spans.values())
    assert batch.parent_id == compute.span_id
    assert compute.encloses(batch)
    assert batch.attributes["vecd.batch.sequences"] == 2
    assert whole.resource["service.version"] == server.info()["version"]


def test_a_refused_request_has_both_too(server, collector):
    trace_id = "1af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
    answer = httpx.post(f"{server.url}/v1/{TEXT}?{TEXT}", json={"input": TEXT}, headers=headers)
    line = line_of(server, answer.headers["x-request-id"])
    assert (line["route"], line["status"], line["error"], line["items"]) == ("other", 404, "unknown_url", None)
    eventually(lambda: bool(collector.trace(trace_id)))
    [span] = collector.trace(trace_id)
    assert (span.name, span.attributes["error.type"]) == ("POST", "unknown_url")


def test_a_trace_that_is_not_sampled_is_in_the_log_alone(server, collector):
    unsampled, after = "2af7651916cd43dd8448eb211c80319c", "3af7651916cd43dd8448eb211c80319c"
    answer = ask(server, unsampled, flags="00")
    assert line_of(server, answer.headers["x-request-id"])["trace_id"] == unsampled
    nonsense = ask(server, traceparent=f"00-{TEXT}-01", tracestate=TEXT)
    assert line_of(server, nonsense.headers["x-request-id"])["trace_id"] is None
    ask(server, after)
    eventually(lambda: bool(collector.trace(after)))
    assert collector.trace(unsampled) == []


def test_no_text_is_in_a_line_or_a_span(server, collector):
    assert TEXT not in server.stderr
    assert not [body for body in collector.bodies if TEXT.encode() in body]


def test_another_format_without_a_restart(server, config, collector):
    config.write_text(f'{CONFIG}log-format = "text"\n')
    before = len(server.stderr)
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: "supervisor INFO reloaded: " in server.stderr[before:], 60)
    answer = ask(server, "4af7651916cd43dd8448eb211c80319c")
    request_id = answer.headers["x-request-id"]
    eventually(lambda: request_id in server.stderr)
    [line] = [line for line in server.stderr.splitlines() if request_id in line]
    assert re.fullmatch(
        r"\S+ \S+ gateway INFO 200 +[0-9.]+ ms POST /v1/embeddings +items=2 tokens=\d+ parse=\S+ tokenize=\S+ "
        r"queue=\S+ compute=\S+ encode=\S+ api=openai id=\S+ trace=4af\w+",
        line,
    )
    assert collector.trace("4af7651916cd43dd8448eb211c80319c") == []


# --- a log that nobody reads ----------------------------------------------------------------------------------------


def flood(port: int, num_requests: int) -> None:
    """Requests on one connection, a hundred at a time."""
    request = b"GET /nothing HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"r" * 100 + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for _ in range(num_requests // 100):
            connection.sendall(request * 100)
            answers = b""
            while answers.count(b"HTTP/1.1 404") < 100 or not answers.endswith(b"}"):
                data = connection.recv(1 << 16)
                assert data
                answers += data


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_a_server_goes_on_though_nobody_reads_its_log(tmp_path):
    """Its stderr is a pipe that is full: 64 KiB in the kernel, 256 KiB kept; here come 700 KB. The supervisor, who has
    the same pipe, reloads all the same, and ends. Nor is there a collector for the spans of all these requests."""
    (tmp_path / "tmp").mkdir()
    reader, writer = os.pipe()
    flags = ["--engine", "dummy", "--workers", "1", "--log-requests", "1000000", "--ready-fd", str(writer)]
    flags += ["--otlp-endpoint", f"http://127.0.0.1:{unused_port()}", "--trace-ratio", "1"]
    with subprocess.Popen(
        vecd("--port", "0", *flags), pass_fds=[writer], env=clean_environment(tmp_path, {}), cwd=tmp_path,
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        os.close(writer)
        try:
            with open(reader) as ready:
                url = json.loads(ready.readline())["url"]
            flood(int(url.rpartition(":")[2]), 3000)
            assert httpx.post(f"{url}/v1/embeddings", json={"input": "x"}).status_code == 200
            metrics = httpx.get(f"{url}/metrics").text
            assert re.search(r"^vecd_log_lines_lost_total [1-9]", metrics, re.MULTILINE), metrics
            process.send_signal(signal.SIGHUP)
            eventually(lambda: [worker["life"] for worker in httpx.get(f"{url}/info").json()["workers"]] == [2], 60)
            # Who reads it at last finds how much is missing.
            assert process.stderr is not None
            text, deadline = b"", time.monotonic() + 30
            while b"lines are lost here" not in text:
                assert select.select([process.stderr], [], [], max(0, deadline - time.monotonic()))[0]
                text += os.read(process.stderr.fileno(), 1 << 16)
            flood(int(url.rpartition(":")[2]), 3000)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
