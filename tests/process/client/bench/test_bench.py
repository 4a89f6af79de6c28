import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vecd.client.bench import report
from vecd.client.bench.command import main
from vecd.client.bench.plot import Point
from vecd.client.bench.report import heading

DEADLINE_S = 60.0


def test_the_table_has_a_row_for_each_number_of_clients(start_server, capsys):
    server = start_server()
    assert main(["--url", server.url, "--clients", "1,2,3", "--requests", "6", "--warmup", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == heading()
    assert [line.split()[0] for line in lines[2:] if "busy" not in line] == ["1", "2", "3"]
    assert len(server.bodies) == 18


def test_a_unix_socket_and_what_is_asked_for_by_default(start_server, tmp_path):
    server = start_server(unix_path=tmp_path / "s")
    assert main(["--url", server.url, "--clients", "2", "--requests", "6", "--warmup", "0"]) == 0
    assert len(server.bodies) == 6
    assert server.bodies[0].keys() == {"input", "encoding_format"}
    assert isinstance(server.bodies[0]["input"], str)
    assert server.bodies[0]["encoding_format"] == "base64"


def test_what_is_asked_for_is_sent(start_server):
    server = start_server()
    options = "--clients 1 --requests 1 --warmup 0 --texts-per-request 4 --words 3 --encoding-format float --model m"
    assert main(["--url", server.url, "--path", "/x", "--api-key", "k", *options.split()]) == 0
    body = server.bodies[0]
    assert [len(text.split()) for text in body["input"]] == [3, 3, 3, 3]
    assert (body["encoding_format"], body["model"]) == ("float", "m")
    assert server.heads[0].startswith(b"POST /x HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in server.heads[0]


def test_each_run_is_one_line_of_json_without_the_key(start_server, tmp_path):
    path = tmp_path / "runs.jsonl"
    server = start_server(lambda n: 200 if n % 2 else 503)
    options = "--clients 1,2 --requests 4 --warmup 0 --api-key s3cret --lengths lognormal:5,0.5"
    assert main(["--url", server.url, "--json", str(path), *options.split()]) == 0
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["clients"], second["clients"]) == (1, 2)
    assert first["requests"] == 2
    assert first["errors"] == {"HTTP 503": 2}
    assert first["lengths"] == "lognormal 5 words (sigma 0.5)"
    assert first["requests_per_s"] > 0
    assert first["p99_ms"] >= first["p50_ms"] > 0
    assert "s3cret" not in path.read_text()


def test_a_dead_server_is_one_clear_line_and_exit_1(dead_url, capsys):
    assert main(["--url", dead_url]) == 1
    assert capsys.readouterr().err.startswith(f"vecd bench: cannot connect to {dead_url}: ")


def test_without_a_single_success_the_exit_code_is_1(start_server, capsys):
    server = start_server(lambda _: 401)
    assert main(["--url", server.url, "--clients", "1", "--requests", "3", "--warmup", "0"]) == 1
    assert '3 × HTTP 401: {"error":{"message":"no luck"}}' in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "https://127.0.0.1/?a=b"],
        ["--clients", "0"],
        ["--duration", "inf"],
        ["--lengths", "normal:1,1"],
        ["--encoding-format", "raw"],
        ["--json", "/nowhere/at/all"],
        ["--rate", "1e9"],
        ["--rate", "10", "--clients", "1"],
        ["--max-connections", "5"],
        ["--rate", "10", "--max-connections", "0"],
        ["--clients", "²"],
        ["--requests", "0"],
        ["--words", "5", "--texts", "x"],
        ["--texts", "/nowhere/at/all"],
        ["--distinct-requests", "0"],
        ["--timeout-ms", "0.5"],
        ["--priority", "a\nb"],
        ["--goodput-ms", "0"],
        ["--timeout", "1e9"],
        ["--bulk-clients", "0"],
        ["--bulk-texts", "5"],
        ["--bulk-clients", "1", "--bulk-words", "many"],
        ["--plot", "curve.svg"],
        ["--plot", "/nowhere/at/all.png"],
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("vecd bench: error: ")
    assert arguments[0].lstrip("-") in last or arguments[-1] in last
    assert " _" not in last


def test_an_interrupt_prints_what_was_measured(start_server):
    bench: list[subprocess.Popen[str]] = []

    def interrupt_at_100(n: int) -> int:
        if n == 100:
            os.kill(bench[0].pid, signal.SIGINT)
        return 200

    server = start_server(interrupt_at_100)
    flags = f"--url {server.url} --clients 2,4 --warmup 0 --duration 600"
    command = [sys.executable, "-m", "vecd", "bench", *flags.split()]
    bench.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        output, _ = bench[0].communicate(timeout=DEADLINE_S)
    finally:
        bench[0].kill()
        bench[0].wait()
    assert bench[0].returncode == 130
    rows = output.splitlines()[2:]
    assert rows[0].split()[0] == "2"
    assert "interrupted" in output
    assert not any(row.split()[0] == "4" for row in rows)


FIELDS = """
    documents documents_hours
    ended_at url path model encoding_format texts_per_request lengths seed warmup_s timeout_s timeout_ms priority mode
    clients rate_per_s max_connections elapsed_s offered requests texts tokens offered_per_s requests_per_s texts_per_s
    tokens_per_s p50_ms p90_ms p99_ms p999_ms max_ms mean_ms goodput_ms goodput_per_s goodput_share errors cpu_share
    ended_early late_share late_max_ms bulk
"""
BULK_FIELDS = """
    clients texts_per_request lengths priority offered requests texts tokens offered_per_s requests_per_s texts_per_s
    tokens_per_s p50_ms p90_ms p99_ms p999_ms max_ms mean_ms errors
"""


def run_for_json(path: Path, url: str, options: str) -> list[dict[str, Any]]:
    main(["--url", url, "--warmup", "0", "--json", str(path), *options.split()])
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_field_is_always_there(start_server, tmp_path):
    path = tmp_path / "runs.jsonl"
    server = start_server()
    run_for_json(path, server.url, "--clients 1 --requests 5")
    options = "--rate 500,600.5 --requests 20 --goodput-ms 5000 --bulk-clients 1"
    closed, opened, faster = run_for_json(path, server.url, options)
    assert closed.keys() == opened.keys() == set(FIELDS.split())
    fields = ("mode", "clients", "rate_per_s", "max_connections")
    assert [closed[name] for name in fields] == ["closed", 1, None, None]
    assert [opened[name] for name in fields] == ["open", None, 500, 1024]
    assert faster["rate_per_s"] == 600.5
    assert (closed["goodput_ms"], closed["goodput_share"], closed["late_share"], closed["bulk"]) == (None,) * 4
    assert (opened["goodput_ms"], opened["goodput_share"], opened["offered"]) == (5000, 1.0, 20)
    assert opened["bulk"].keys() == set(BULK_FIELDS.split())
    assert (opened["bulk"]["clients"], opened["bulk"]["texts_per_request"]) == (1, 512)


def test_bulk_has_texts_a_priority_and_a_row_of_its_own(start_server, capsys):
    server = start_server()
    options = "--clients 1 --requests 5 --warmup 0 --timeout-ms 250 --priority interactive"
    bulk = "--bulk-clients 1 --bulk-texts 2 --bulk-words 3 --bulk-priority bulk"
    assert main(["--url", server.url, *options.split(), *bulk.split()]) == 0
    heads = dict(zip((isinstance(body["input"], list) for body in server.bodies), server.heads, strict=False))
    assert b"\r\nx-vecd-timeout-ms: 250\r\n" in heads[False]
    assert b"\r\nx-vecd-priority: interactive\r\n" in heads[False]
    assert b"\r\nx-vecd-priority: bulk\r\n" in heads[True]
    assert b"x-vecd-timeout-ms" not in heads[True]
    texts = next(body["input"] for body in server.bodies if isinstance(body["input"], list))
    assert [len(text.split()) for text in texts] == [3, 3]
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[2:4]]
    assert rows[0][:2] == ["1", "client"]
    assert rows[1] == ["+", "1", "bulk"]


def test_texts_of_a_file_are_sent(start_server, tmp_path):
    server, path = start_server(), tmp_path / "texts"
    path.write_text("alpha\n\nbeta\n")
    options = f"--clients 1 --requests 4 --warmup 0 --distinct-requests 2 --texts {path}"
    assert main(["--url", server.url, *options.split()]) == 0
    assert sorted(body["input"] for body in server.bodies) == ["alpha", "alpha", "beta", "beta"]


def test_a_table_that_nobody_takes_is_one_line_and_exit_1(start_server, capsys, monkeypatch):
    def refuse(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(report, "row", refuse)
    assert main(["--url", start_server().url, "--clients", "1", "--requests", "1", "--warmup", "0"]) == 1
    assert capsys.readouterr().err == "vecd bench: [Errno 32] Broken pipe\n"


def test_starting_loads_nothing_heavy():
    heavy = {"matplotlib", "numpy", "torch", "hypothesis"}
    code = f"import sys, vecd.client.bench.command; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.strip() == ""


def test_documents_are_divided_by_the_rate(start_server, capsys):
    server = start_server()
    options = "--clients 1 --requests 20 --warmup 0 --documents 7200000 --json -"
    assert main(["--url", server.url, *options.split()]) == 0
    out, table = capsys.readouterr()
    found = json.loads(out)
    assert found["documents_hours"] == pytest.approx(2000 / found["texts_per_s"], rel=0.01)
    assert f"7,200,000 such texts take {found['documents_hours']:,.3g} server-hours" in table


def test_what_a_plot_needs_is_said_before_anything_is_measured(start_server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    server = start_server()
    with pytest.raises(SystemExit) as exit_info:
        main(["--url", server.url, "--plot", str(tmp_path / "curve.png")])
    assert exit_info.value.code == 2
    assert "pip install 'vecd[plot]'" in capsys.readouterr().err
    assert server.bodies == []


def test_a_point_a_run(start_server, tmp_path, monkeypatch):
    drawn: list[dict[str, list[Point]]] = []
    monkeypatch.setattr("vecd.client.bench.options.require_matplotlib", lambda: None)
    monkeypatch.setattr("vecd.client.bench.command.draw_latency", lambda curves, *_: drawn.append(curves))
    server = start_server()
    options = ["--clients", "1,2", "--requests", "5", "--warmup", "0", "--plot", str(tmp_path / "curve.png")]
    assert main(["--url", server.url, *options]) == 0
    ((name, points),) = drawn[0].items()
    assert name == server.url
    assert [point.label for point in points] == ["1 client", "2 clients"]
    assert all(point.throughput_per_s > 0 and 0 < (point.p50_ms or 0) <= (point.p99_ms or 0) for point in points)
